"""Megatron's options as flags of `slimebus trainer`, and their help."""

import inspect
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from slimebus.config import Resolved
from slimebus.config.flags import ExternalOption
from slimebus.config.schema import docstrings
from trainer.arguments.checks import is_installed, megatron_problems, model_problems, option_table
from trainer.objective.plugin_settings import known_settings

if TYPE_CHECKING:
    from trainer.arguments.megatron_options import Option


class TrainerOptions:
    """The settings of algorithms and corrections; every other option is taken for one of Megatron's, and judged with the config."""

    def option(self, name: str) -> ExternalOption | None:
        """What `--name` sets; None where Megatron is not installed."""
        key = name.replace("-", "_")
        if key in known_settings():
            return ExternalOption(f"algorithm.settings.{key}")
        if not key.isidentifier() or not is_installed():
            return None
        return ExternalOption("trainer.params_dtype", "bfloat16") if key == "bf16" else ExternalOption(f"megatron.{key}")

    def problems(self, resolved: Resolved) -> Sequence[str]:
        """What is wrong with the model folder, and with Megatron's options in this config where Megatron is installed."""
        return [*model_problems(resolved), *(megatron_problems(resolved) if is_installed() else ())]


def help_text(width: int = 0) -> str:
    """Every option by config class: its flag, what it takes, its default, Megatron's meaning, and what decides it otherwise."""
    from trainer.compat.cpu_compat import import_megatron

    import_megatron()
    from trainer.arguments.megatron_options import CLASSES, options, spellings, yaml_text

    width, seen = width or shutil.get_terminal_size((100, 24)).columns, set[str]()
    lines = ["Options of megatron-core, as flags or under `megatron:`. A switch --x has its opposite --no-x."]
    for owner in (base for cls in CLASSES for base in reversed(cls.__mro__[:-1])):
        lines += ["", f"{owner.__name__}:"]
        for name in [name for name in inspect.get_annotations(owner) if name not in seen and options()[name].alternatives]:
            lines += _entry(options()[name], docstrings(sys.modules[owner.__module__]).get((owner.__name__, name), ""), width)
            seen.add(name)
    lines += ["", "Megatron-LM's spellings:"]
    for name, spelling in sorted(spellings().items()):
        value = "VALUE" if spelling.value is None else yaml_text(spelling.value)
        lines.append(f"  --{name.replace('_', '-')}  =  {spelling.field}: {value}")
    lines += ["", "Decided elsewhere:"]
    lines += [f"  --{name.replace('_', '-')}: {why}" for name, why in sorted(option_table().rejected_with_hint.items())]
    return "\n".join(lines)


def _entry(option: "Option", meaning: str, width: int) -> Iterator[str]:
    from trainer.arguments.megatron_options import fields_of_other_sections, forced_value, yaml_text

    yield f"  --{option.name.replace('_', '-')}  [{option.expected_text}; default {yaml_text(option.default)}]"
    texts = [meaning]
    if section := fields_of_other_sections().get(option.name):
        texts.append(f"Not here: set {section}.")
    elif option.name in option_table().of_the_model:
        texts.append("The model folder decides; accepted where it says the same.")
    elif why := option_table().fixed.get(option.name):
        texts.append(f"Always {yaml_text(forced_value(option.name))}: {why}.")
    for text in texts:
        yield from textwrap.wrap(text, width, initial_indent="      ", subsequent_indent="      ")
