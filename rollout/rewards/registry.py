"""Built-in rewards by name, and the reward function that a config asks for."""

from pathlib import Path

from rollout.plugins import Plugin
from slimebus.bus.errors import UsageError

BUILT_IN = {"exact": "rollout.rewards.exact:reward", "math": "rollout.rewards.math:reward", "random": "rollout.rewards.random:reward"}


def find(rm_type: str, custom_rm_path: str, base: Path | None) -> Plugin:
    """The reward function of a config: a hook, or a built-in one by name. Raises UsageError or HookError."""
    if custom_rm_path:
        return Plugin.load("reward", custom_rm_path, base, ["response"])
    if rm_type not in BUILT_IN:
        raise UsageError(f"rollout.rm_type: no built-in reward {rm_type!r}; expected one of {', '.join(BUILT_IN)}, or set custom_rm_path")
    return Plugin.load("reward", BUILT_IN[rm_type], None)
