"""Which engines a worker starts: model, arguments and GPUs of each (engine.num_engines, engine.sglang_config)."""

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import yaml

from slimebus.bus.errors import ConfigError, UsageError

if TYPE_CHECKING:  # the config checks itself with what is here
    from slimebus.config.schema import RunConfig

VISIBLE = "CUDA_VISIBLE_DEVICES"
RANKS = (("tp_size", "tensor_parallel_size", "tp"), ("pp_size", "pipeline_parallel_size", "pp"))
REPLICAS = ("dp_size", "data_parallel_size", "dp")


class EngineSpec(NamedTuple):
    """One engine. model: its name, empty for the policy's of a config without engine.sglang_config; gpus: none: all that are visible.

    suffix: of its log file. The defaults are those of an engine that is not started here.
    """

    model: str = ""
    directory: Path = Path()
    is_frozen: bool = False
    gpus: tuple[int, ...] = ()
    arguments: dict[str, Any] = {}
    suffix: str = ""


class _Group(msgspec.Struct, forbid_unknown_fields=True):
    num_gpus: int
    worker_type: Literal["regular"] = "regular"  # the one of slime's that there is here
    num_gpus_per_engine: int = 0
    overrides: dict[str, Any] = {}


class _Model(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    server_groups: list[_Group]
    model_path: str = ""
    update_weights: bool | None = None
    num_gpus_per_engine: int = 1


class _File(msgspec.Struct, forbid_unknown_fields=True):
    sglang: list[_Model]


def engine_specs(config: "RunConfig", model_dir: Path, base: Path) -> list[EngineSpec]:
    """The engines that one worker of this config starts. base: the folder of the run.yaml. Raises ConfigError."""
    gpus = gpus_of(config)
    if not config.engine.sglang_config:
        size = gpus_per_engine(config.sglang)
        num_engines = config.engine.num_engines or max(1, len(gpus) // size)
        wanted = [(_Model("", [], update_weights=True), _Group(size), model_dir)] * num_engines
    else:
        wanted = list(_wanted(_read(base / config.engine.sglang_config), model_dir, base))
    num_wanted = sum(group.num_gpus for _, group, _ in wanted)
    if gpus and len(gpus) < num_wanted:
        raise ConfigError(f"engine.gpus: {len(gpus)} GPUs for a worker, its engines need {num_wanted}; give more, or start fewer workers")
    if not gpus and len(wanted) > 1:
        gpus = list(range(num_wanted))
    taken = iter(gpus)
    specs = []
    for i, (model, group, directory) in enumerate(wanted):
        own, suffix = tuple(itertools.islice(taken, group.num_gpus)), f"-{i + 1}" if len(wanted) > 1 else ""
        specs.append(EngineSpec(model.name, directory, not model.update_weights, own, {**config.sglang, **group.overrides}, suffix))
    return specs


def _read(file: Path) -> list[_Model]:
    try:
        models = msgspec.convert(yaml.safe_load(file.read_text()), _File).sglang
    except (OSError, yaml.YAMLError, msgspec.ValidationError) as bad:
        raise ConfigError(f"engine.sglang_config: {file}: {' '.join(str(bad).split())}") from None
    for model in models:
        if model.update_weights is None:
            model.update_weights = not model.model_path
    names = [model.name for model in models]
    if len({*names, ""}) != len(names) + 1 or sum(bool(model.update_weights) for model in models) != 1:
        raise ConfigError(f"engine.sglang_config: {file}: models need names of their own, and one of them update_weights: true, the policy")
    return models


def _wanted(models: Sequence[_Model], model_dir: Path, base: Path) -> Iterator[tuple[_Model, _Group, Path]]:
    """(model, its group for one engine, its directory) of each engine."""
    for model in models:
        for group in model.server_groups:
            size = group.num_gpus_per_engine or model.num_gpus_per_engine
            if size < 1 or group.num_gpus < 1 or group.num_gpus % size:
                raise ConfigError(f"engine.sglang_config: {model.name}: num_gpus {group.num_gpus} is no multiple of {size} GPUs an engine")
            ranks = {"tp_size": size} if size > 1 else {}
            one = msgspec.structs.replace(group, num_gpus=size, overrides={**ranks, **group.overrides})
            yield from [(model, one, base / model.model_path if model.model_path else model_dir)] * (group.num_gpus // size)


def gpus_per_engine(arguments: Mapping[str, Any]) -> int:
    """As SGLang's server counts them."""
    given = {name.lstrip("-").replace("-", "_"): value for name, value in arguments.items()}
    size = 1
    for names in (*RANKS, *(() if given.get("enable_dp_attention") else (REPLICAS,))):
        size *= next((int(given[name]) for name in names if name in given), 1)
    return size


def gpus_of(config: "RunConfig") -> list[int]:
    """Of a worker's engines: engine.gpus, else those that its environment names; empty: not known."""
    named = os.environ.get(VISIBLE, "").split(",")
    return config.engine.gpus or ([int(word) for word in named] if all(word.isdigit() for word in named) else [])


def visible(gpus: Sequence[int]) -> dict[str, str]:
    """The environment of a process that is to see these GPUs; nothing for none."""
    return {VISIBLE: ",".join(map(str, gpus))} if gpus else {}


def placement(config: "RunConfig", roles: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """The GPUs of each of these processes of one machine, by name: `trainer`, `critic`, `teacher`, `rollout`, `rollout-2`, ...

    Those of the trainer and a critic are trainer.gpus, as many as each has ranks; a teacher's the last of engine.gpus, one engine's worth,
    and the workers share the others evenly. Empty where none are named. Raises UsageError when they do not go round.
    """
    ranks, given = config.trainer.nproc_per_node, iter(config.trainer.gpus)
    trainers = [role for role in ("trainer", "critic") if role in roles]
    if config.trainer.gpus and len(config.trainer.gpus) < ranks * len(trainers):
        what = f"{len(config.trainer.gpus)} GPUs for {ranks} ranks each of {' and '.join(trainers)}"
        raise UsageError(f"trainer.gpus: {what}; give each rank one")
    found = {role: tuple(itertools.islice(given, ranks)) for role in trainers}
    gpus, workers = config.engine.gpus, [role for role in roles if role.partition("-")[0] == "rollout"]
    if gpus and "teacher" in roles:
        size = gpus_per_engine(config.sglang)
        found["teacher"], gpus = tuple(gpus[-size:]), gpus[:-size]
    each, rest = divmod(len(gpus), max(1, len(workers)))
    if rest or (config.engine.gpus and not each):
        raise UsageError(f"engine.gpus: {len(gpus)} GPUs do not divide among {len(workers)} workers; give --workers another number")
    return found | {role: tuple(gpus[i * each : (i + 1) * each]) for i, role in enumerate(workers)}


def placement_problems(config: "RunConfig") -> Iterator[str]:
    """GPUs that are given twice, or do not fit the ranks and engines."""
    trainer, engine = config.trainer.gpus, config.engine.gpus
    for field, gpus in (("trainer.gpus", trainer), ("engine.gpus", engine)):
        if len({*gpus}) < len(gpus):
            yield f"{field}: {gpus} names a GPU twice"
    if both := sorted({*trainer} & {*engine}):
        yield f"trainer.gpus and engine.gpus both have {both}; a GPU trains or samples"
    if trainer and len(trainer) % config.trainer.nproc_per_node:
        yield f"trainer.gpus: {len(trainer)} GPUs for trainer.nproc_per_node {config.trainer.nproc_per_node}; give each rank one"
    size = gpus_per_engine(config.sglang)
    if engine and not config.engine.sglang_config and len(engine) % size:
        yield f"engine.gpus: {len(engine)} GPUs do not divide into engines of {size} (sglang: tp_size x pp_size x dp_size)"
