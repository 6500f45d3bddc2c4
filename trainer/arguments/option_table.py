"""What is known of Megatron's options besides their source: option_table.yaml, which explains its tables; and what follows from them."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from slimebus.cli.config.schema import OptimizerConfig, TrainerConfig
from trainer.arguments.fields import enum_members, megatron_fields
from trainer.arguments.kinds import Kind


class Spelling(msgspec.Struct, frozen=True):
    """One option of Megatron-LM, with underscores. value: what it stands for alone; None: the value that follows it."""

    field: str
    value: bool | str | None = None


class OptionTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tables of option_table.yaml."""

    fixed: dict[str, str]
    in_force: dict[str, bool]
    needs: dict[str, str]
    choices: dict[str, tuple[str, ...]]
    of_the_model: frozenset[str]
    model_options: dict[str, str]
    config_keys: dict[str, tuple[str, ...]]
    spellings: dict[str, Spelling]
    instead: dict[str, str]
    other_names: dict[str, str]


@cache
def option_table() -> OptionTable:
    """The tables, read once."""
    return msgspec.yaml.decode(Path(__file__).with_name("option_table.yaml").read_bytes(), type=OptionTable)


def fields_of_other_sections() -> dict[str, str]:
    """Fields that another section of the config decides: what to set instead."""
    sections = {"trainer": TrainerConfig, "optimizer": OptimizerConfig}
    own = {field: f"set {section}.{field}" for section, config in sections.items() for field in config.__struct_fields__}
    precision = dict.fromkeys(("bf16", "params_dtype", "pipeline_dtype", "autocast_dtype"), "set trainer.params_dtype")
    return {name: instead for name, instead in (precision | own).items() if name in megatron_fields()}


@cache
def spellings() -> Mapping[str, Spelling]:
    """Every spelling that is not the field's own name, and the field and value it means."""
    found = dict(option_table().spellings)
    for field in megatron_fields().values():
        value = field.default == "False" if field.annotation == "bool" else None
        for flag in field.spellings:
            found.setdefault(flag.removeprefix("--").replace("-", "_"), Spelling(field.name, value))
    return {name: spelling for name, spelling in found.items() if name not in megatron_fields() and spelling.field in megatron_fields()}


@cache
def kind_of(name: str) -> Kind:
    """The kind of the field, or of the option about the model, `name`."""
    table = option_table()
    return Kind(table.model_options.get(name) or megatron_fields()[name].annotation, table.choices.get(name, ()), enum_members())


def said_by(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a Hugging Face config says under one of `config_keys`, by Megatron's names."""
    found = {name: [config[key] for key in keys if config.get(key) is not None] for name, keys in option_table().config_keys.items()}
    return {name: values[0] for name, values in found.items() if values}
