"""What is known of Megatron's options besides its own classes: option_table.yaml, which explains its tables. No torch here."""

from functools import cache
from pathlib import Path

import msgspec


class Spelling(msgspec.Struct, frozen=True):
    """One option of Megatron-LM, with underscores. value: what it stands for alone; None: the value that follows it."""

    field: str
    value: bool | str | None = None


class OptionTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tables of option_table.yaml."""

    fixed: dict[str, str]
    forced_value: dict[str, bool]
    needs: dict[str, str]
    choices: dict[str, tuple[str, ...]]
    of_the_model: frozenset[str]
    model_options: dict[str, str]
    spellings: dict[str, Spelling]
    rejected_with_hint: dict[str, str]


@cache
def option_table() -> OptionTable:
    """The tables, read once."""
    return msgspec.yaml.decode(Path(__file__).with_name("option_table.yaml").read_bytes(), type=OptionTable)
