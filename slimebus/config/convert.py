"""From the map that a run.yaml is to a RunConfig, field by field, so that every mistake is found at once."""

import difflib
import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

from slimebus.config.schema import OPEN_MAPS, SECTIONS, EvalDataset, RunConfig, flag_of, paths


@functools.cache
def other_names() -> dict[str, str]:
    """Flags of slime, verl and TRL without dashes, some with a value -> what to write here, or why there is none."""
    return msgspec.yaml.decode(Path(__file__).with_name("other_names.yaml").read_bytes(), type=dict[str, str])


def written_here(name: str, value: object) -> str:
    """`. Here: ...` for a value of slime, verl or TRL that the field takes under another name; else nothing."""
    here = other_names().get(f"{flag_of(name)} {value}")
    return f". Here: {here}" if here else ""


OF_MEGATRON = "; other fields of Megatron's configs, such as weight_decay, go under megatron"
ELSEWHERE = {
    "algorithm": "; what belongs to an algorithm or correction goes under algorithm.settings",
    "optimizer": OF_MEGATRON,
    "trainer": OF_MEGATRON,
}
"""Section -> where a key belongs that it does not have."""


class Converter:
    """Makes the config of a map. What is wrong with a value is added to `problems`, its name to `broken`; its default stands in for it.

    origin: dotted name -> the place that is named with a problem.
    """

    def __init__(self, origin: Mapping[str, str], problems: list[str]) -> None:
        self.origin, self.problems = origin, problems
        self.broken: set[str] = set()

    def config(self, tree: Mapping[str, Any]) -> RunConfig:
        """The config of these values."""
        made: RunConfig = self.struct(RunConfig, tree, "")
        return made

    def struct(self, cls: type[msgspec.Struct], given: Any, name: str) -> Any:
        """One of this class from a map; `name` is the dotted name of the map."""
        if given is not None and not isinstance(given, dict):
            self._refuse(name, f"{name}: got {_shown(given)}; expected a map of its fields")
        prefix = f"{name}." if name else ""
        fields = {field.name: field for field in msgspec.structs.fields(cls)}
        values = given if isinstance(given, dict) else {}
        for key in values.keys() - fields.keys():
            near = nearest(prefix + str(key), [prefix + f for f in fields])
            self._refuse(f"{prefix}{key}", f"unknown key {prefix + str(key)!r}{near}{ELSEWHERE.get(name, '')}")
        chosen: dict[str, Any] = {}
        for key, field in fields.items():
            if key in values:
                try:
                    chosen[key] = self._value(field.type, values[key], prefix + key)
                except (msgspec.ValidationError, OverflowError, UnicodeEncodeError):
                    expected = f"expected {describe(field.type)}{written_here(prefix + key, values[key])}"
                    self._refuse(prefix + key, f"{prefix}{key}: got {_shown(values[key])}; {expected}")
            elif field.required and values is given:
                self._refuse(prefix + key, f"{prefix}{key} is not set", place=self.origin.get(name))
            if field.required:
                chosen.setdefault(key, "")
        return cls(**chosen)

    def _value(self, kind: Any, given: Any, name: str) -> Any:
        if inspect.isclass(kind) and issubclass(kind, msgspec.Struct):
            return self.struct(kind, given, name)
        if name == "eval.datasets" and isinstance(given, dict):
            return {str(key): self.struct(EvalDataset, one, f"{name}.{key}") for key, one in given.items()}
        value = msgspec.convert(given, kind, strict=False)
        if isinstance(value, float) and (math.isnan(value) or (math.isinf(value) and name != "broker.max_staleness")):
            raise OverflowError(name)
        if isinstance(value, str | list) and b"\0" in "".join(map(str, value)).encode():  # no file and no process takes it, nor a surrogate
            raise OverflowError(name)
        return value

    def _refuse(self, name: str, text: str, *, place: str | None = None) -> None:
        self.broken.add(name)
        self.problems.append(f"{self.origin.get(name, place or 'config')}: {text}")


def nearest(name: str, beside: Sequence[str] = ()) -> str:
    """`; did you mean 'x'?`, or nothing when no name is near. A name of another section is found by its last part."""
    names = [*beside, *paths(), *SECTIONS, *OPEN_MAPS]
    by_last = {known.rpartition(".")[2]: known for known in reversed(names)}
    last = name.rpartition(".")[2].replace("-", "_")
    near = [by_last[last]] if last in by_last else difflib.get_close_matches(name, names, 1, 0.6)
    near = near or [by_last[word] for word in difflib.get_close_matches(last, by_last, 1, 0.6)]
    return f"; did you mean {near[0]!r}?" if near else ""


def nearest_of(name: str, known: Sequence[str]) -> str:
    """`; did you mean 'x'?` for the nearest of these, or nothing when none is near."""
    near = difflib.get_close_matches(name, known, 1, 0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def _shown(value: Any) -> str:
    if value is None or isinstance(value, dict):
        return "nothing" if value is None else "a map"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def describe(of: Any) -> str:
    """What a field of this type takes, in words: `a whole number >= 1`, `one of fsync, os, memory`."""
    if get_origin(of) in (Union, UnionType):
        return " or ".join("nothing" if part is NoneType else describe(part) for part in get_args(of))
    if get_origin(of) is Literal and len(get_args(of)) == 1:
        return str(get_args(of)[0])
    if get_origin(of) is Literal:
        return f"one of {', '.join(str(choice) or repr('') for choice in get_args(of))}"
    kind = msgspec.inspect.type_info(of)
    if isinstance(kind, msgspec.inspect.IntType | msgspec.inspect.FloatType):
        word = "a whole number" if isinstance(kind, msgspec.inspect.IntType) else "a number"
        bounds = {">=": kind.ge, ">": kind.gt, "<=": kind.le, "<": kind.lt}
        return f"{word} {' and '.join(f'{sign} {bound}' for sign, bound in bounds.items() if bound is not None)}".strip()
    if isinstance(kind, msgspec.inspect.ListType):
        is_of_numbers = isinstance(kind.item_type, msgspec.inspect.IntType)
        return "a list of whole numbers, such as [1, 2]" if is_of_numbers else "a list of texts, such as [a, b]"
    words = {msgspec.inspect.BoolType: "true or false", msgspec.inspect.DictType: "a map, with texts for keys"}
    return words.get(type(kind), "text (in quotes, where YAML takes it for something else)")
