"""Megatron's options as flags of `slimebus trainer`, and their help."""

import contextlib
import difflib
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from slimebus.bus.errors import ConfigError
from slimebus.cli.config import Resolved
from slimebus.cli.config.flags import SIMILAR, ForeignFlag, is_run_file
from trainer.arguments.checks import megatron_problems, model_problems
from trainer.arguments.fields import SOURCES, MegatronField, core_folder, megatron_fields
from trainer.arguments.option_table import fields_of_other_sections, kind_of, option_table, spellings
from trainer.arguments.options import fixed_value, names, shown
from trainer.objective.plugin_settings import known_settings, settings_of_file

PLUGIN_FILE = re.compile(r"([\w./-]+\.py):\w+")
PRECISION = ForeignFlag("trainer.params_dtype", alone="bfloat16", takes="nothing")


class TrainerFlags:
    """Megatron-core's fields, Megatron-LM's spellings, the settings of algorithms and corrections. Values are checked with the config."""

    def flag(self, name: str) -> ForeignFlag | None:
        """What `--name` sets."""
        key = name.replace("-", "_")
        if key in known_settings():
            return ForeignFlag(f"algorithm.settings.{key}")
        if not is_installed():
            return None
        if key == "bf16":
            return PRECISION
        if key in names() or key in megatron_fields():
            return ForeignFlag(f"megatron.{key}", takes=_takes(key))
        positive = key.removeprefix("no_")
        if positive != key and positive not in option_table().instead and _takes(positive) == "switch":
            return ForeignFlag(f"megatron.{positive}", alone="false", takes="nothing")
        return None

    def nearest(self, name: str, words: Sequence[str]) -> list[str]:
        """As flags: the name that slime's or verl's has here, a setting of an own plug-in that the RUN.yaml or the command line names, or
        options that are spelled like it.
        """
        if other := option_table().other_names.get(name):
            return [other]
        if name.replace("-", "_") in own_settings(words):
            return [f"--algorithm-{name}"]
        known = [*known_settings(), *(names() if is_installed() else ())]
        near = difflib.get_close_matches(name.replace("-", "_"), known, n=1, cutoff=SIMILAR)
        return [f"--{word.replace('_', '-')}" for word in near]

    def problems(self, resolved: Resolved) -> Sequence[str]:
        """What is wrong with the model folder, and with Megatron's options in this config where Megatron is installed."""
        return [*model_problems(resolved), *(megatron_problems(resolved) if resolved.config.megatron and is_installed() else ())]


def own_settings(words: Sequence[str]) -> set[str]:
    """Settings of the plug-ins by path, `file.py:Class`, that these words or the RUN.yaml among them name, as far as it can be read."""
    found, run_files = set[str](), [Path(word) for word in words if is_run_file(word)]
    with contextlib.suppress(OSError, UnicodeDecodeError, SyntaxError):
        text = "\n".join([*words, *(file.read_text() for file in run_files)])
        for path in PLUGIN_FILE.findall(text):
            found.update(settings_of_file((run_files[0].parent if run_files else Path()) / path))
    return found


def is_installed() -> bool:
    """Whether there is a megatron-core to ask."""
    try:
        return bool(core_folder())
    except ConfigError:
        return False


def _takes(key: str) -> Literal["switch", "word", "words", "any"]:
    spelling = spellings().get(key)
    if spelling and spelling.value is not None:
        return "switch"
    name = spelling.field if spelling else key
    field = megatron_fields().get(name)
    if name not in option_table().model_options and not (field and field.is_option):
        return "any"
    kind = kind_of(name)
    return "switch" if kind.is_switch else "words" if kind.is_list else "word"


def help_text(width: int = 0) -> str:
    """Every option by config class: its flag, what it takes, its default, Megatron's meaning, and what decides it otherwise."""
    width = width or shutil.get_terminal_size((100, 24)).columns
    lines = ["Options of megatron-core, as flags or under `megatron:`. A switch --x has its opposite --no-x."]
    for owner in SOURCES:
        lines += ["", f"{owner}:"]
        fields = [field for field in megatron_fields().values() if field.owners[0] == owner and field.is_option]
        for field in fields:
            lines += _entry(field, width)
    lines += ["", "Megatron-LM's spellings:"]
    for name, spelling in sorted(spellings().items()):
        value = "VALUE" if spelling.value is None else shown(spelling.value)
        lines.append(f"  --{name.replace('_', '-')}  =  {spelling.field}: {value}")
    lines += ["", "Decided elsewhere:"]
    lines += [f"  --{name.replace('_', '-')}: {why}" for name, why in sorted(option_table().instead.items())]
    return "\n".join(lines)


def _entry(field: MegatronField, width: int) -> Iterator[str]:
    default = f"; default {field.default}" if field.default else ""
    yield f"  --{field.name.replace('_', '-')}  [{kind_of(field.name).words}{default}]"
    texts = [field.meaning]
    if field.name in fields_of_other_sections():
        texts.append(f"Not here: {fields_of_other_sections()[field.name]}.")
    elif field.name in option_table().of_the_model:
        texts.append("The model folder decides; accepted where it says the same.")
    elif why := option_table().fixed.get(field.name):
        texts.append(f"Always {shown(fixed_value(field.name))}: {why}.")
    for text in texts:
        yield from textwrap.wrap(text, width, initial_indent="      ", subsequent_indent="      ")
