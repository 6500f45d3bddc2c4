"""An OpenAI-compatible endpoint; its conversations become samples (docs/agents.md)."""

from rollout.endpoint.agents import Agent, OutsideAgents

__all__ = ["Agent", "OutsideAgents"]
