"""The config for people: units and meanings from the docstrings of the schema, for flags, `slimebus init` and docs/configuration.md."""

import ast
import functools
import inspect
import sys
from collections.abc import Iterator
from types import ModuleType

import msgspec

from slimebus.config import schema


class FieldDoc(msgspec.Struct, frozen=True):
    """One field: its dotted name, unit, meaning and default as it would be written in YAML."""

    name: str
    unit: str
    meaning: str
    default: str


@functools.cache
def docstrings(module: ModuleType = schema) -> dict[tuple[str, str], str]:
    """(class, field) -> the string that follows the field in this module."""
    found = {}
    for cls in ast.parse(inspect.getsource(module)).body:
        if isinstance(cls, ast.ClassDef):
            for field, doc in zip(cls.body, cls.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
                    found[cls.name, ast.unparse(field.target)] = " ".join(str(doc.value.value).split())
    return found


def fields_of(cls: type[msgspec.Struct], prefix: str = "") -> list[FieldDoc]:
    """The documented plain fields of a section, or of any struct with docstrings for its fields."""
    docs = []
    for field in msgspec.structs.fields(cls):
        doc = docstrings(sys.modules[cls.__module__]).get((cls.__name__, field.name), "")
        unit, _, meaning = doc.removeprefix("[").partition("] ")
        docs.append(FieldDoc(f"{prefix}{field.name}", unit.rstrip("]"), meaning, _default(field)))
    return docs


def _default(field: msgspec.structs.FieldInfo) -> str:
    """As it would be written in YAML."""
    if field.required:
        return "required"
    value = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    return str(value).lower() if isinstance(value, bool) else str(value) or '""'


def sections() -> Iterator[tuple[str, type[msgspec.Struct], list[FieldDoc]]]:
    """(name, class, fields) of each section, the top level first under the empty name."""
    top = [f for f in fields_of(schema.RunConfig) if f.name not in schema.SECTIONS]
    yield "", schema.RunConfig, top
    for name, cls in schema.SECTIONS.items():
        yield name, cls, fields_of(cls, f"{name}.")
