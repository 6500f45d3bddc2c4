"""Clients of a broker: connecting a role, pushing prompts, reading groups as a consumer."""
