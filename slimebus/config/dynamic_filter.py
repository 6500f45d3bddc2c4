"""The built-in dynamic sampling filter, by the name that slime's users know: groups with equal rewards are dropped."""

REWARD_SPREAD = "check_reward_nonzero_std"


def is_reward_spread(path: str) -> bool:
    """True for the built-in filter, also as slime's own import path; the broker applies it, and no worker loads it."""
    return path.rpartition(":")[2].rpartition(".")[2] == REWARD_SPREAD and ".py:" not in path
