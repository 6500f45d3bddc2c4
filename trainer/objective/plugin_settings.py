"""Which settings of their own the plug-ins of this package have, read from their source by ast: no torch, no import of them."""

import ast
from collections.abc import Mapping
from functools import cache
from pathlib import Path

TRAINER = Path(__file__).parents[1]
KINDS = {"algorithms": "algorithm.advantage_estimator", "corrections": "algorithm.corrections"}
"""Folder of the plug-ins -> the field that names them."""


def plugin_names(kind: str) -> list[str]:
    """Those of trainer/algorithms or trainer/corrections: the names of their files."""
    return sorted(file.stem for file in (TRAINER / kind).glob("*.py") if not file.stem.startswith("_"))


@cache
def known_settings() -> Mapping[str, tuple[str, ...]]:
    """Setting -> the plug-ins that have it."""
    found: dict[str, list[str]] = {}
    for name, file in ((name, TRAINER / kind / f"{name}.py") for kind in KINDS for name in plugin_names(kind)):
        for setting in settings_of_file(file):
            found.setdefault(setting, []).append(name)
    return {setting: tuple(owners) for setting, owners in found.items()}


def settings_of_file(file: Path) -> list[str]:
    """The settings of the plug-ins in a file, those of the classes that they derive from first."""
    classes = [node.name for node in _tree(file).body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    return list(dict.fromkeys(setting for name in classes for setting in _settings(file, name)))


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def _settings(file: Path, name: str) -> list[str]:
    """The fields of class `name`'s Settings; the class is in this file, or imported there from another of this package."""
    for node in _tree(file).body:
        if isinstance(node, ast.ImportFrom) and name in [alias.asname or alias.name for alias in node.names]:
            source = TRAINER.parent.joinpath(*(node.module or "").split(".")).with_suffix(".py")
            return _settings(source, name) if source.is_file() and TRAINER in source.parents else []
        if isinstance(node, ast.ClassDef) and node.name == name:
            own = next((inner for inner in node.body if isinstance(inner, ast.ClassDef) and inner.name == "Settings"), None)
            bases = [base.value for base in own.bases if isinstance(base, ast.Attribute)] if own else node.bases
            inherited = [field for base in bases if isinstance(base, ast.Name) for field in _settings(file, base.id)]
            return inherited + ([field.target.id for field in own.body if _is_field(field)] if own else [])  # type: ignore[attr-defined]
    return []


def _is_field(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
