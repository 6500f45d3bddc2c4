"""What is wrong with a run's model folder, Megatron options and layout, found before any rank starts.

Importing Megatron takes seconds and most of a gigabyte, which a launcher or `slimebus config check` does not need: a process of its own
imports it, judges the options (megatron_check.py) and ends. No torch here.

python -m trainer.arguments.checks  < CheckRequest   writes a CheckReply, both as JSON
"""

import importlib.util
import json
import logging
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from slimebus.bus.errors import ConfigError
from slimebus.config import Resolved
from slimebus.config.model_folder import read_config
from slimebus.config.schema import TrainerConfig
from trainer.hf.families import ALWAYS, Family, family_of, megatron_values
from trainer.objective.plugin_settings import known_settings, settings_of_file

log = logging.getLogger("trainer")


class Spelling(msgspec.Struct, frozen=True):
    """One option of Megatron-LM, with underscores. value: what it stands for alone; None: the value that follows it."""

    field: str
    value: bool | str | None = None


class OptionTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tables of option_table.yaml."""

    fixed: dict[str, str]
    forced_value: dict[str, bool]
    needs: dict[str, str]
    choices: dict[str, tuple[str, ...]]
    of_the_model: frozenset[str]
    model_options: dict[str, str]
    spellings: dict[str, Spelling]
    rejected_with_hint: dict[str, str]


@cache
def option_table() -> OptionTable:
    """The tables, read once."""
    return msgspec.yaml.decode(Path(__file__).with_name("option_table.yaml").read_bytes(), type=OptionTable)


CHECK_S = 120.0
"""As long as a busy machine may take to import Megatron."""


class CheckRequest(msgspec.Struct):
    """given: the `megatron` section. shape: what config.json says of the model, by Megatron's names; empty without a model folder.

    other_names: what an unknown name may have been meant for besides Megatron's and the config's.
    """

    given: dict[str, Any]
    trainer: TrainerConfig
    shape: dict[str, Any]
    other_names: list[str]


class CheckReply(msgspec.Struct):
    """problems: key as given -> what is wrong. refusal: Megatron's own, of all options together. expert_ranks: expert parallel and expert
    tensor parallel size.
    """

    problems: dict[str, str] = {}
    refusal: str = ""
    expert_ranks: tuple[int, int] = (1, 1)


def is_installed() -> bool:
    """Whether there is a megatron-core to ask."""
    return importlib.util.find_spec("megatron") is not None


def megatron_problems(resolved: Resolved, world_size: int = 0) -> list[str]:
    """A sentence for each option that is unknown, wrong, decided elsewhere, or contradicts another, the layout or the model folder; and
    where the ranks are known, and do not divide by the layout.
    """
    config, reply = resolved.config, CheckReply()
    if config.megatron:
        request = CheckRequest(config.megatron, config.trainer, shape_of(resolved), plugin_settings(resolved))
        if (asked := ask_megatron(request)) is None:
            return []
        reply = asked
    places = {key: resolved.origin.get(f"megatron.{key}", "config") for key in reply.problems}
    found = [*(f"{places[key]}: megatron.{key}: {text}" for key, text in reply.problems.items()), *filter(None, [reply.refusal])]
    if world_size and not found:
        try:
            check_layout(config.trainer, world_size, reply.expert_ranks)
        except ConfigError as bad:
            found.append(bad.text)
    return found


def ask_megatron(request: CheckRequest) -> CheckReply | None:
    """The reply of a process that imports Megatron; None, with a warning, where it fails or takes longer than CHECK_S."""
    command, given = [sys.executable, "-P", "-m", "trainer.arguments.checks"], json.dumps(msgspec.to_builtins(request)).encode()
    try:
        done = subprocess.run(command, input=given, capture_output=True, timeout=CHECK_S, check=True)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as bad:
        lines = (bad.stderr or b"").decode(errors="replace").strip().splitlines()
        why = lines[-1] if lines else str(bad)
        log.warning("Megatron could not check its options before the ranks start, which check them again: %s", why)
        return None
    return msgspec.json.decode(done.stdout, type=CheckReply)


def plugin_settings(resolved: Resolved) -> list[str]:
    """The dotted name of each setting of the algorithms and corrections of this package, and of the chosen ones in files."""
    chosen = [resolved.config.algorithm.advantage_estimator, *resolved.config.algorithm.corrections]
    files = [resolved.path(name.rpartition(":")[0]) for name in chosen if ".py:" in name]
    own = [setting for file in files if file.is_file() for setting in settings_of_file(file)]
    return [f"algorithm.settings.{name}" for name in [*known_settings(), *own]]


def model_problems(resolved: Resolved) -> list[str]:
    """Why the trainer refuses the model folder: a family that is not verified, or what has no map in one that is. No folder: nothing."""
    try:
        raw = read_config(resolved.model_dir)
    except ConfigError:
        return []
    if "model_type" not in raw:  # of a folder that is not made yet
        return []
    try:
        family = family_of(str(raw.get("model_type")), resolved.config.model.family)
        family.check(as_transformers(family, raw))
    except ConfigError as bad:
        return [f"model.hf_checkpoint: {resolved.model_dir}: {bad.text}"]
    return []


def as_transformers(family: Family, raw: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with the defaults of transformers that the family looks at, and rope's settings under their name there."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    return {**family.defaults, **raw, "rope_parameters": rope}


def shape_of(resolved: Resolved) -> dict[str, Any]:
    """What config.json says of the model, by Megatron's names; empty where there is no model folder."""
    try:
        tree = read_config(resolved.model_dir)
    except ConfigError:
        return {}
    text = tree.get("text_config") or tree
    text = text | {key: value for key, value in (text.get("rope_parameters") or {}).items() if key not in text}
    shape = megatron_values(text) | ALWAYS
    shape |= {"position_embedding_type": "rope", "use_rotary_position_embeddings": True}
    if shape.get("num_query_groups") and shape.get("num_attention_heads"):
        shape["group_query_attention"] = shape["num_query_groups"] < shape["num_attention_heads"]
    if "tie_word_embeddings" in tree:
        shape["untie_embeddings_and_output_weights"] = not tree["tie_word_embeddings"]
    return shape


def check_layout(trainer: TrainerConfig, world_size: int, expert_ranks: tuple[int, int]) -> None:
    """Raise ConfigError unless the ranks divide by tensor x pipeline x context, and by expert tensor x pipeline x expert.

    expert_ranks: expert parallel and expert tensor parallel size.
    """
    pipeline, (experts, expert_tensor) = trainer.pipeline_model_parallel_size, expert_ranks
    inner = {
        "context": (trainer.tensor_model_parallel_size, trainer.context_parallel_size),
        "expert": (expert_tensor, experts),
    }
    for kind, (tensor, size) in inner.items():
        ranks = tensor * pipeline * size
        if world_size % ranks:
            split = {"tensor": trainer.tensor_model_parallel_size, "expert tensor": expert_tensor if kind == "expert" else 1}
            split |= {"pipeline": pipeline, kind: size}
            above_1 = " or ".join(name for name, of in split.items() if of > 1 and (name, kind) != ("tensor", "expert"))
            raise ConfigError(
                f"{world_size} trainer ranks do not divide by {ranks} = tensor {tensor} x pipeline {pipeline} x {kind} {size};"
                f" start a multiple of {ranks} (--nproc-per-node, --nnodes), or lower {above_1} parallelism"
            )


if __name__ == "__main__":
    from trainer.compat.cpu_compat import import_megatron

    import_megatron()
    from trainer.model import megatron_check

    megatron_check.main()
