"""The `megatron` section read: each option by its field, its value checked, and what is wrong with the others in one sentence each."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.arguments.fields import megatron_fields
from trainer.arguments.kinds import Kind
from trainer.arguments.option_table import Spelling, fields_of_other_sections, kind_of, option_table, spellings


@dataclass
class MegatronOptions:
    """values: field -> value, enums and dtypes as words; model: what was said of the model, which its folder decides.

    problems: key as given -> what is wrong. places: field -> the key that gave it.
    """

    values: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)


def read_options(given: Mapping[str, Any]) -> MegatronOptions:
    """Everything under `megatron`, whether spelled as megatron-core's field or as Megatron-LM's option."""
    options = MegatronOptions()
    for key, value in given.items():
        try:
            _take(options, key, value)
        except ValueError as bad:
            options.problems[key] = str(bad)
    for name, needed in option_table().needs.items():
        is_at_work = name in options.values and options.values[name] != _default(name)
        is_free = not options.problems.keys() & {options.places.get(name, name), needed}
        if is_at_work and is_free and not options.values.get(needed):
            options.problems[options.places[name]] = f"without effect unless {needed} is set; set it too, or leave {name} out"
    return options


def _take(options: MegatronOptions, key: str, value: Any) -> None:
    (name, value), table = _field_and_value(key, value), option_table()
    if name in options.places and (options.values | options.model)[name] != value:
        other = (options.values | options.model)[name]
        raise ValueError(f"says {shown(value)}, but {options.places[name]} has said {shown(other)}; keep one of them")
    options.places[name] = key
    (options.model if name in table.of_the_model or name in table.model_options else options.values)[name] = value
    if name in table.fixed and value != fixed_value(name):
        raise ValueError(f"{shown(value)} is not possible: {table.fixed[name]}")


def _field_and_value(key: str, value: Any) -> tuple[str, Any]:
    name, table = str(key).lstrip("-").replace("-", "_"), option_table()
    if name in fields_of_other_sections():
        raise ValueError(f"not here; {fields_of_other_sections()[name]}")
    if name in table.instead:
        raise ValueError(f"no option here: {table.instead[name]}")
    spelling = spellings().get(name)
    target = spelling.field if spelling else name
    if target not in megatron_fields() and target not in table.model_options:
        raise ValueError(f"no field of Megatron's configs{nearest(name)}")
    if target in megatron_fields() and not megatron_fields()[target].is_option:
        raise ValueError("is an object of Python's, which no option can carry")
    if spelling and spelling.value is not None:
        return target, _alone(spelling, value)
    return target, _read(kind_of(target), value)


def _read(kind: Kind, value: Any) -> Any:
    try:
        return kind.read(value)
    except ValueError:
        raise ValueError(f"got {shown(value)}; expected {kind.words}") from None


def _alone(spelling: Spelling, value: Any) -> Any:
    """The value of a spelling such as `swiglu`, which is true, or false for the opposite."""
    if _read(Kind("bool"), value):
        return spelling.value
    return (not spelling.value) if isinstance(spelling.value, bool) else None


def nearest(name: str) -> str:
    """`; did you mean 'x'?`, or nothing when no name is near."""
    near = difflib.get_close_matches(name, names(), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def names() -> list[str]:
    """Every key that `megatron` may have, and those that are refused with a reason."""
    fields = [name for name, one in megatron_fields().items() if one.is_option]
    return sorted({*fields, *spellings(), *option_table().model_options, *option_table().instead})


def shown(value: Any) -> str:
    """A value as YAML would have it."""
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value) if not isinstance(value, str) else repr(value)


def _default(name: str) -> Any:
    """The default of the field `name`; the text of its source where that is no plain value."""
    text = megatron_fields()[name].default
    try:
        return kind_of(name).read({"None": None}.get(text, text.strip("'\"")))
    except ValueError:
        return text


def fixed_value(name: str) -> Any:
    """The value in force of a field that cannot be chosen."""
    in_force = option_table().in_force
    return in_force[name] if name in in_force else _default(name)
