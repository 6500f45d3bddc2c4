"""Which fields Megatron's config classes have, read from their source by ast: no torch, no megatron import."""

import ast
import difflib
import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from slimebus.bus.errors import ConfigError
from slimebus.cli.config.schema import OptimizerConfig, TrainerConfig

# class -> file under megatron/core, and the class it inherits fields from
SOURCES = {
    "ModelParallelConfig": "model_parallel_config.py",
    "TransformerConfig": "transformer/transformer_config.py",
    "OptimizerConfig": "optimizer/optimizer_config.py",
    "DistributedDataParallelConfig": "distributed/distributed_data_parallel_config.py",
}


def core_folder() -> Path:
    """Where megatron/core lies. Raises ConfigError when it is not installed."""
    spec = importlib.util.find_spec("megatron")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("megatron-core is not installed; install slimebus[trainer]")
    return Path(next(iter(spec.submodule_search_locations))) / "core"


def class_fields(source: str, name: str) -> set[str]:
    """Annotated fields of dataclass `name` in `source`."""
    body = next(node.body for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name)
    return {node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}


@cache
def megatron_fields() -> Mapping[str, frozenset[str]]:
    """Fields by config class; TransformerConfig includes what it inherits."""
    root = core_folder()
    found = {name: class_fields((root / path).read_text(), name) for name, path in SOURCES.items()}
    found["TransformerConfig"] |= found.pop("ModelParallelConfig")
    return {name: frozenset(fields) for name, fields in found.items()}


def elsewhere() -> dict[str, str]:
    """Fields of Megatron's that other sections of the config decide, and those that would be without effect: what to do instead."""
    sections = {"trainer": TrainerConfig, "optimizer": OptimizerConfig}
    own = {field: f"set {section}.{field}" for section, config in sections.items() for field in config.__struct_fields__}
    return own | {"virtual_pipeline_model_parallel_size": "leave it out, each rank has one chunk of the model"}


def split_megatron_options(options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Sort options by the config class that has them; one that several classes have goes to each.

    Raises ConfigError for a name that none has, with the nearest that exists, and for one that another section decides.
    """
    for name in options.keys() & elsewhere().keys():
        raise ConfigError(f"megatron.{name}: not here; {elsewhere()[name]}")
    by_class = megatron_fields()
    known = set().union(*by_class.values())
    for name in options.keys() - known:
        near = difflib.get_close_matches(name, sorted(known), n=1)
        raise ConfigError(f"megatron: no field {name!r} in {', '.join(by_class)}" + (f"; did you mean {near[0]!r}?" if near else ""))
    return {cls: {k: v for k, v in options.items() if k in fields} for cls, fields in by_class.items()}
