"""What each of Megatron's config classes is given of the `megatron` section, and what a rank alone can check of it."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from slimebus.bus.errors import ConfigError
from trainer.arguments.checks import contradiction_text
from trainer.arguments.fields import enum_members, megatron_fields
from trainer.arguments.options import read_options

CLASSES = {
    "TransformerConfig": ("ModelParallelConfig", "TransformerConfig"),
    "OptimizerConfig": ("OptimizerConfig",),
    "DistributedDataParallelConfig": ("DistributedDataParallelConfig",),
}
"""Class that is built -> the classes whose fields it has."""


def split_megatron_options(given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The options by the config class that has them, enums and dtypes made; one that several classes have goes to each. What they say of
    the model is left out, as the model folder decides it.

    Raises ConfigError for the first that is wrong; `slimebus.cli.config` and the launch name them all.
    """
    options = read_options(given)
    for key, text in options.problems.items():
        raise ConfigError(f"megatron.{key}: {text}")
    made = {name: _made(name, value) for name, value in options.values.items()}
    fields = megatron_fields()
    return {cls: {name: value for name, value in made.items() if {*fields[name].owners} & {*owners}} for cls, owners in CLASSES.items()}


def _made(name: str, value: Any) -> Any:
    """The value as Megatron's dataclass has it."""
    annotation = megatron_fields()[name].annotation
    if isinstance(value, str) and "torch.dtype" in annotation:
        import torch

        return getattr(torch, value)
    enum = next((word for word, members in enum_members().items() if word in annotation and value in members), None)
    if enum is not None:
        from megatron.core.transformer import enums

        return getattr(enums, enum)[value]
    return value


def check_architecture(config: Any, given: Mapping[str, Any]) -> None:
    """Raise ConfigError where an option about the model differs from `config`, the TransformerConfig made from the model folder."""
    options = read_options(given)
    for name, value in options.model.items():
        if hasattr(config, name) and (actual := getattr(config, name)) != value:
            raise ConfigError(f"megatron.{options.places[name]}: {contradiction_text(value, actual)}")


@contextlib.contextmanager
def refusals_in_one_line() -> Iterator[None]:
    """Make Megatron's refusal of a config, raised while it is built, a ConfigError."""
    try:
        yield
    except (ValueError, AssertionError, NotImplementedError, RuntimeError) as refused:
        trace, is_config = refused.__traceback__, False
        while trace is not None:
            is_config = is_config or trace.tb_frame.f_code.co_name == "__post_init__"
            trace = trace.tb_next
        if not is_config:
            raise
        raise ConfigError(f"megatron: {' '.join(str(refused).split())}") from refused
