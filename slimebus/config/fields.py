"""The config for people: units and meanings from the schema's docstrings, as flags' help and as docs/configuration.md.

`python -m slimebus.config.fields` prints the document.
"""

import ast
import functools
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from slimebus.config import schema


class FieldDoc(msgspec.Struct, frozen=True):
    """One field: its dotted name, unit, meaning and default as it would be written in YAML."""

    name: str
    unit: str
    meaning: str
    default: str

    @property
    def flag(self) -> str:
        """Its command-line flag."""
        return "--" + self.name.rpartition(".")[2].replace("_", "-")

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return "SLIMEBUS_" + self.name.replace(".", "_").upper()


@functools.cache
def docstrings() -> dict[tuple[str, str], str]:
    """(class, field) -> the string that follows the field in schema.py."""
    found = {}
    for cls in ast.parse(inspect.getsource(schema)).body:
        if isinstance(cls, ast.ClassDef):
            for field, doc in zip(cls.body, cls.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
                    found[cls.name, ast.unparse(field.target)] = " ".join(str(doc.value.value).split())
    return found


def fields_of(cls: type[msgspec.Struct], prefix: str = "") -> list[FieldDoc]:
    """The documented plain fields of a section."""
    docs = []
    for field in msgspec.structs.fields(cls):
        doc = docstrings().get((cls.__name__, field.name), "")
        unit, _, meaning = doc.removeprefix("[").partition("] ")
        docs.append(FieldDoc(f"{prefix}{field.name}", unit.rstrip("]"), meaning, _default(field)))
    return docs


def _default(field: Any) -> str:
    if field.default is not msgspec.NODEFAULT:
        return _yaml(field.default)
    if field.default_factory is not msgspec.NODEFAULT:
        return "[]" if field.default_factory is list else "{}"
    return "required"


def _yaml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return '""' if value == "" else str(value)


def sections() -> Iterator[tuple[str, type[msgspec.Struct], list[FieldDoc]]]:
    """(name, class, fields) of each section, the top level first under the empty name."""
    top = [f for f in fields_of(schema.RunConfig) if f.name not in schema.SECTIONS]
    yield "", schema.RunConfig, top
    for name, cls in schema.SECTIONS.items():
        yield name, cls, fields_of(cls, f"{name}.")


def markdown() -> str:
    """docs/configuration.md."""
    lines = [
        "# Configuration",
        "",
        "One YAML file describes a run; every role reads the same one. A value comes from, strongest first: a command-line flag,",
        "the file, an environment variable, the default. `slimebus config show RUN.yaml` prints the resolved config with the origin",
        "of each value; `slimebus config check RUN.yaml` only checks it. An unknown key is an error that names the nearest known one.",
        "",
        "This page is made from the docstrings of `slimebus/config/schema.py` by `python -m slimebus.config.fields`.",
    ]
    for name, cls, docs in sections():
        lines += [
            "",
            f"## {name or 'Top level'}",
            "",
            (cls.__doc__ or "").strip(),
            "",
            "| field | unit | default | meaning |",
            "|---|---|---|---|",
        ]
        lines += [f"| `{d.name}` | {d.unit} | `{d.default}` | {d.meaning} |" for d in docs]
    lines += ["", "## eval.datasets.NAME", "", (schema.EvalDataset.__doc__ or "").strip(), ""]
    lines += ["| field | unit | default | meaning |", "|---|---|---|---|"]
    lines += [f"| `{d.name}` | {d.unit} | `{d.default}` | {d.meaning} |" for d in fields_of(schema.EvalDataset)]
    lines += [
        "",
        "## Flags and environment",
        "",
        "The flag of `broker.max_staleness` is `--max-staleness`; its variable is `SLIMEBUS_BROKER_MAX_STALENESS`. Lists are given",
        "comma-separated. The trainer also takes any field of megatron-core's configs as a flag (`--recompute-granularity full`), the",
        "rollout worker any argument of SGLang with the prefix `--sglang-`.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(markdown())
