"""Lease, generate, reward, put: a rollout worker, its engines and its weight puller."""
