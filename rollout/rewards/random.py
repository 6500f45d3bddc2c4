"""A coin, the same for the same response: for testing a pipeline, not a model."""

import hashlib

from rollout.samples.response import Response

IN_WORKER = True


def reward(response: Response) -> float:
    """0.0 or 1.0, by a hash of the tokens."""
    return float(hashlib.sha256(response.token_ids.tobytes()).digest()[0] & 1)
