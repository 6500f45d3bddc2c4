"""Built-in rewards by name, and the reward that a config asks for."""

import importlib
from pathlib import Path
from typing import get_args

import msgspec

from rollout.rewards.wire import ASKS, RewardSpec
from slimebus.bus.errors import UsageError
from slimebus.config.schema import EvalDataset, RewardName, RolloutConfig

BUILT_IN: tuple[str, ...] = get_args(RewardName)
IN_WORKER = ("exact", "random")
"""So quick and harmless that they need no process."""


def find(r: RolloutConfig, base: Path, dataset: EvalDataset | None = None) -> RewardSpec:
    """The reward of a config, or of an evaluation that has its own: a hook, or a built-in one by name. Raises UsageError or HookError."""
    own = dataset if dataset is not None and (dataset.rm_type or dataset.custom_rm_path) else r
    path = own.custom_rm_path or own.rm_type
    if path in ASKS and not r.rm_url:
        raise UsageError(f"rollout.rm_type: {path} asks a server; give its address as rollout.rm_url")
    if path in BUILT_IN and (problem := getattr(importlib.import_module(f"rollout.rewards.{path}"), "missing", str)()):
        raise UsageError(f"rollout.rm_type: {path} {problem}")
    spec = RewardSpec(path, str(base), r.reward_key, r.rm_url, r.reward_timeout_s)
    signature = spec.load().signature()
    named = list(signature.parameters) if signature is not None else []
    return msgspec.structs.replace(spec, is_group=named[:1] == ["responses"])
