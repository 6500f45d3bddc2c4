"""The settings that all ranks of a trainer must share: each tells its own, and a difference is refused, for any launcher.

What a run was last trained with is in RUN_DIR/trainer-settings.json: a resumed trainer logs what has changed since.
"""

import contextlib
import logging
import operator
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from slimebus.atomic_file import make_private, replacing
from slimebus.bus.errors import ConfigError
from slimebus.config import RunConfig
from slimebus.config.agreement import OF_SAMPLING, OF_TRAINER, folder_hash, hook_text, shortened

log = logging.getLogger("trainer")

FILE = "trainer-settings.json"
SECTIONS = ("algorithm", "optimizer", "trainer", "megatron")
MAY_DIFFER = {f"trainer.{name}" for name in ("nproc_per_node", "train_threads", "save_hf", "tensorboard", "dump_samples", "stop_grace_s")}
"""Of these sections: each node's own. Launchers compare the number of ranks."""
ALSO = (
    *("name", "seed", "model.family", "weights.update_weights_interval", "broker.required_fields"),
    *(f"rollout.{name}" for name in OF_TRAINER),
    *(f"rollout.rollout_{name}" for name in OF_SAMPLING),
)
UNSET = "unset"


def shared_settings(config: RunConfig, base: Path | None = None, model_dir: Path | None = None) -> dict[str, str]:
    """Dotted name -> text of each setting that all ranks must share. Paths become hashes of what lies there: the model folder's config
    and tokenizer, and plug-ins in files. base: the folder of the run.yaml.
    """
    tree = msgspec.to_builtins(config)
    found = {name: operator.attrgetter(name)(config) for name in ALSO}
    for section in SECTIONS:
        found |= dict(_leaves(section, tree[section]))
    found["algorithm.advantage_estimator"] = hook_text(config.algorithm.advantage_estimator, base)
    found["algorithm.corrections"] = [hook_text(name, base) for name in config.algorithm.corrections]
    said = {name: shortened(_text(value)) for name, value in found.items()}
    return {name: said[name] for name in sorted(said.keys() - MAY_DIFFER)} | {
        "model.hf_checkpoint": f"hash {folder_hash(model_dir)}" if model_dir else UNSET
    }


def _leaves(prefix: str, tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{prefix}.{key}"
        if name == "algorithm.settings":
            yield from _leaves(name, value)
        else:
            yield name, value


def _text(value: object) -> str:
    """A plain word as it is, anything else as JSON."""
    if isinstance(value, str) and value:
        return value
    return msgspec.json.encode(value, order="sorted").decode()


def check_agreement(said: Sequence[Mapping[str, str]]) -> None:
    """Raise ConfigError with a clause for each setting in which some ranks differ from the first."""
    names = dict.fromkeys(name for one in said for name in one)
    if differing := [text for name in names for text in _disagreements(name, [one.get(name, UNSET) for one in said])]:
        raise ConfigError(f"{'; '.join(differing)}; start every rank with the same settings")


def _disagreements(name: str, values: Sequence[str]) -> Iterator[str]:
    for value in dict.fromkeys(values):
        having = [i for i, other in enumerate(values) if other == value]
        if value != values[0]:
            others = f" (and {len(having) - 1} more)" if len(having) > 1 else ""
            yield f"rank {having[0]}{others} has {name} {value}, rank 0 {values[0]}"


def note_settings(run_dir: Path, settings: Mapping[str, str], *, is_resumed: bool) -> None:
    """Log a line for each setting that differs from those recorded, where the run goes on from a checkpoint; record these."""
    before: dict[str, str] = {}
    with contextlib.suppress(OSError, msgspec.DecodeError):  # a run from before there was a record
        before = msgspec.json.decode((run_dir / FILE).read_bytes(), type=dict[str, str])
    if is_resumed and before:
        for name in sorted(before.keys() | settings.keys()):
            old, new = before.get(name, UNSET), settings.get(name, UNSET)
            if old != new:
                log.warning("changed since the run was last started: %s: %s -> %s", name, old, new)
    make_private(run_dir)
    with replacing(run_dir / FILE) as file:
        file.write(msgspec.json.format(msgspec.json.encode(dict(settings)), indent=2))
