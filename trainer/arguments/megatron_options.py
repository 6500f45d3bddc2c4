"""The `megatron` section read against Megatron's own config classes. Imports Megatron: only after cpu_compat.import_megatron.

Ranks build their configs of it; before any rank starts, a process of its own judges it (megatron_check.py).
"""

import difflib
import inspect
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from slimebus.bus.errors import ConfigError
from slimebus.config.convert import describe
from slimebus.config.schema import paths
from trainer.arguments.checks import Spelling, option_table

CLASSES = (MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
BUILT = (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
"""What options are split into; the fields that MLATransformerConfig adds are the model's."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}
DTYPES |= {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
"""Megatron-LM's words and torch's; Megatron keeps fp8 moments as uint8."""
NOTHING = ("none", "null", "None", "")
SCALARS = {"bool": bool, "int": int, "float": float, "str": str}


@dataclass(frozen=True)
class Option:
    """A field of Megatron's configs. alternatives: the types that a value may have, as msgspec checks them, or the objects by their words;
    empty where only Python can make one (functions, objects).
    """

    name: str
    alternatives: tuple[Any, ...]
    default: Any = None
    spellings: tuple[str, ...] = ()

    @property
    def expected_text(self) -> str:
        """What it takes: `none or one of full, selective`."""
        return " or ".join(dict.fromkeys(map(expected_text, self.alternatives)))

    def convert(self, value: Any) -> Any:
        """The value as Megatron's dataclass has it. Raises ValueError when it does not fit."""
        if NoneType in self.alternatives and (value is None or value in NOTHING):
            return None
        for form in self.alternatives:
            with suppress(msgspec.ValidationError, KeyError, TypeError):
                return _convert(value, form)
        raise ValueError(f"got {yaml_text(value)}; expected {self.expected_text}")


@dataclass
class MegatronOptions:
    """values: field -> value; model: what was given of the model, which its folder decides.

    problems: key as given -> what is wrong. keys: field -> the key that gave it.
    """

    values: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)


# --- the options there are ---


@cache
def options() -> Mapping[str, Option]:
    """Every field of the config classes by name, in the order of the source, and the options about the model that are none."""
    found: dict[str, Option] = {}
    for cls in CLASSES:
        hints = get_type_hints(cls)
        for one in fields(cls):
            flags = one.metadata.get("argparse_meta", {}).get("arg_names", ())
            names = tuple(flag.removeprefix("--").replace("-", "_") for flag in flags)
            found.setdefault(one.name, Option(one.name, _alternatives(one.name, hints[one.name]), _default(one), names))
    return found | {name: Option(name, _alternatives(name, SCALARS[kind])) for name, kind in option_table().model_options.items()}


@cache
def spellings() -> Mapping[str, Spelling]:
    """Every spelling of Megatron-LM's that is not the field's own name, and the field and value it means."""
    found = dict(option_table().spellings)
    for option in options().values():
        value = not option.default if option.alternatives == (bool,) else None
        found |= {name: Spelling(option.name, value) for name in option.spellings if name not in found}
    return {name: spelling for name, spelling in found.items() if name not in options()}


@cache
def fields_of_other_sections() -> Mapping[str, str]:
    """Names that another section of the config decides -> the field there."""
    precision = dict.fromkeys(("bf16", "pipeline_dtype", "autocast_dtype"), "trainer.params_dtype")
    return precision | {name.rpartition(".")[2]: name for name in paths()}


def forced_value(name: str) -> Any:
    """The value of a field that cannot be chosen."""
    return option_table().forced_value.get(name, options()[name].default)


def _default(one: Field[Any]) -> Any:
    return one.default_factory() if one.default_factory is not MISSING else one.default


def _alternatives(name: str, hint: Any) -> tuple[Any, ...]:
    """None comes first, as it fits nothing else."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    forms = [form for part in parts if (form := _form(part, option_table().choices.get(name))) is not None]
    return tuple(sorted(forms, key=lambda form: form is not NoneType)) if any(form is not NoneType for form in forms) else ()


def _form(hint: Any, choices: tuple[str, ...] | None) -> Any:
    """One alternative; None for what no option can carry."""
    if hint is str and choices:
        return Literal[choices]
    if hint is torch.dtype:
        return DTYPES
    if inspect.isclass(hint) and issubclass(hint, Enum):
        return dict(hint.__members__)
    if get_origin(hint) is list:
        inner = _form(get_args(hint)[0], choices)
        return list[inner] if inner is not None and not isinstance(inner, dict) else None  # type: ignore[valid-type]
    return hint if hint in (NoneType, list, *SCALARS.values()) or get_origin(hint) in (Literal, tuple) else None


def expected_text(form: Any) -> str:
    """One alternative in words."""
    if isinstance(form, dict):
        return f"one of {', '.join(form)}"
    if get_origin(form) is list:
        return f"several with commas between, each {expected_text(get_args(form)[0])}"
    if get_origin(form) is tuple:
        return f"{len(get_args(form))} values with commas between"
    return {NoneType: "none", str: "text", list: "a list"}.get(form) or describe(form)


def _convert(value: Any, form: Any) -> Any:
    if isinstance(form, dict):
        return form[value.removeprefix("torch.") if isinstance(value, str) else value]
    if get_origin(form) in (list, tuple) and isinstance(value, str):
        value = value.split(",")
    made = msgspec.convert(value, form, strict=isinstance(value, int | float))
    if any(isinstance(one, float) and not math.isfinite(one) for one in (made if isinstance(made, list) else [made])):
        raise TypeError
    return made


# --- what was given ---


def read_options(given: Mapping[str, Any], other_names: Sequence[str] = ()) -> MegatronOptions:
    """Everything under `megatron`, whether spelled as megatron-core's field or as Megatron-LM's option.

    other_names: what an unknown name may have been meant for besides Megatron's and the config's.
    """
    found = MegatronOptions()
    for key, value in given.items():
        try:
            _add_option(found, key, value, other_names)
        except ValueError as bad:
            found.problems[key] = str(bad)
    for name, needed in option_table().needs.items():
        is_at_work = name in found.values and found.values[name] != options()[name].default
        is_free = not found.problems.keys() & {found.keys.get(name, name), needed}
        if is_at_work and is_free and not found.values.get(needed):
            why = option_table().fixed.get(needed)
            remedy = f"which is not possible: {why}" if why else f"set it too, or leave {name} out"
            found.problems[found.keys[name]] = f"without effect unless {needed} is set{', ' if why else '; '}{remedy}"
    return found


def _add_option(found: MegatronOptions, key: str, value: Any, other_names: Sequence[str]) -> None:
    name, table = key.lstrip("-").replace("-", "_"), option_table()
    option, made = _option_and_value(name, value, other_names)
    before = found.values | found.model
    if option.name in before and before[option.name] != made:
        first = found.keys[option.name]
        raise ValueError(f"says {yaml_text(made)}, but {first} has said {yaml_text(before[option.name])}; keep one of them")
    found.keys[option.name] = key
    (found.model if option.name in table.of_the_model or option.name in table.model_options else found.values)[option.name] = made
    if option.name in table.fixed and made != forced_value(option.name):
        raise ValueError(f"{yaml_text(made)} is not possible: {table.fixed[option.name]}")


def _option_and_value(name: str, value: Any, other_names: Sequence[str]) -> tuple[Option, Any]:
    table, known = option_table(), options().keys() | spellings().keys()
    if name in table.rejected_with_hint:
        raise ValueError(f"no option here: {table.rejected_with_hint[name]}")
    if name in fields_of_other_sections():
        raise ValueError(f"not here; set {fields_of_other_sections()[name]}")
    if value is False and name not in known and f"no_{name}" in known:  # of the flag --no-NAME
        name, value = f"no_{name}", True
    if name not in known:
        by_last_word = {one.rpartition(".")[2]: one for one in [*paths(), *other_names, *known, *table.rejected_with_hint]}
        near = "".join(f"; did you mean {by_last_word[one]!r}?" for one in difflib.get_close_matches(name, by_last_word, n=1))
        raise ValueError(f"no field of Megatron's configs, and no option of slimebus{near}")
    spelling = spellings().get(name, Spelling(name))
    option = options()[spelling.field]
    if not option.alternatives:
        raise ValueError("is an object of Python's, which no option can carry")
    if spelling.value is None:
        return option, option.convert(value)
    opposite = not spelling.value if isinstance(spelling.value, bool) else None
    return option, option.convert(spelling.value if Option(name, (bool,)).convert(value) else opposite)


def yaml_text(value: Any) -> str:
    """A value as YAML would have it."""
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, bool | torch.dtype):
        return str(value).lower().removeprefix("torch.")
    return repr(value) if isinstance(value, str) else str(value)


# --- Megatron's configs ---


def split_megatron_options(given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The options by the config class that has them; one that several classes have goes to each. What they say of the model is left out,
    as the model folder decides it.

    Raises ConfigError for the first that is wrong; `slimebus config check` and the launch name them all.
    """
    found = read_options(given)
    for key, text in found.problems.items():
        raise ConfigError(f"megatron.{key}: {text}")
    return {cls.__name__: {one.name: found.values[one.name] for one in fields(cls) if one.name in found.values} for cls in BUILT}


def make_config(cls: Any, values: Mapping[str, Any]) -> Any:
    """One of Megatron's configs. Raises ConfigError, in Megatron's words, where its own checks refuse the values."""
    try:
        return cls(**values)
    except (ValueError, AssertionError, NotImplementedError, RuntimeError) as refused:
        raise ConfigError(f"megatron: {' '.join(str(refused).split())}") from refused


def expert_ranks(given: Mapping[str, Any]) -> tuple[int, int]:
    """Expert parallel and expert tensor parallel size: 1 unless given, also where tensor parallelism is not."""
    values = read_options(given).values
    return values.get("expert_model_parallel_size") or 1, values.get("expert_tensor_parallel_size") or 1


def check_architecture(config: Any, given: Mapping[str, Any]) -> None:
    """Raise ConfigError where an option about the model differs from `config`, the TransformerConfig made from the model folder."""
    found = read_options(given)
    for name, value in found.model.items():
        if hasattr(config, name) and (actual := getattr(config, name)) != value:
            raise ConfigError(f"megatron.{found.keys[name]}: {contradiction_text(value, actual)}")


def contradiction_text(given: Any, actual: Any) -> str:
    """The sentence about a model option that the model folder contradicts."""
    return f"{yaml_text(given)}, but the model folder's config.json makes it {yaml_text(actual)}, and decides; leave it out"
