"""The fields of megatron-core's config classes, read from their source by ast: no torch, no megatron import."""

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from slimebus.bus.errors import ConfigError

SOURCES = {
    "ModelParallelConfig": "model_parallel_config.py",
    "TransformerConfig": "transformer/transformer_config.py",
    "MLATransformerConfig": "transformer/transformer_config.py",
    "OptimizerConfig": "optimizer/optimizer_config.py",
    "DistributedDataParallelConfig": "distributed/distributed_data_parallel_config.py",
}
"""Class -> its file under megatron/core. A field that several have is shown with the first."""
ENUMS = "transformer/enums.py"
OBJECTS = ("Callable", "ContextManager", "RecipeConfig")
"""What no option can carry."""


@dataclass(frozen=True)
class MegatronField:
    """One field. owners: the classes that have it; spellings: Megatron-LM's flags for it, where its generator has another name."""

    name: str
    owners: tuple[str, ...]
    annotation: str
    default: str
    meaning: str
    spellings: tuple[str, ...] = ()

    @property
    def is_option(self) -> bool:
        """Whether a command line or a file can give it."""
        return not self.name.startswith("_") and not any(word in self.annotation for word in OBJECTS)


def core_folder() -> Path:
    """Where megatron/core lies. Raises ConfigError when it is not installed."""
    spec = importlib.util.find_spec("megatron")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("megatron-core is not installed; install slimebus[trainer]")
    return Path(next(iter(spec.submodule_search_locations))) / "core"


@cache
def class_of(name: str) -> ast.ClassDef:
    """The syntax tree of the config class `name`."""
    tree = _tree(SOURCES[name])
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


@cache
def megatron_fields() -> Mapping[str, MegatronField]:
    """Every field of the config classes by name, in the order of the source."""
    found: dict[str, MegatronField] = {}
    for owner in SOURCES:
        for field in _fields(owner):
            known = found.get(field.name)
            found[field.name] = replace(known, owners=(*known.owners, owner)) if known else field
    return found


@cache
def enum_members() -> Mapping[str, tuple[str, ...]]:
    """The names of the members of each enum that an annotation may name."""
    classes = (node for node in _tree(ENUMS).body if isinstance(node, ast.ClassDef))
    return {
        node.name: tuple(ast.unparse(target) for line in node.body if isinstance(line, ast.Assign) for target in line.targets)
        for node in classes
    }


@cache
def _tree(path: str) -> ast.Module:
    return ast.parse((core_folder() / path).read_text())


def _fields(owner: str) -> Iterator[MegatronField]:
    body = class_of(owner).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            meaning = " ".join(str(after.value.value).split()) if is_text else ""  # type: ignore[union-attr]
            default, spellings = _default(node.value)
            yield MegatronField(node.target.id, (owner,), ast.unparse(node.annotation), default, meaning, spellings)


def _default(value: ast.expr | None) -> tuple[str, tuple[str, ...]]:
    """The default as source text, and the flags that `field(metadata=...)` names."""
    if not isinstance(value, ast.Call):
        return (ast.unparse(value) if value is not None else "", ())
    given = {keyword.arg: keyword.value for keyword in value.keywords}
    names = [node for key, node in _pairs(given.get("metadata")) if key == "arg_names"]
    default = given.get("default")
    return (ast.unparse(default) if default is not None else "", tuple(ast.literal_eval(names[0])) if names else ())


def _pairs(node: ast.expr | None) -> Iterator[tuple[object, ast.expr]]:
    """Every key and value of nested dict displays."""
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            yield (key.value if isinstance(key, ast.Constant) else None), value
            yield from _pairs(value)
