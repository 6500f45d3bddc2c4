"""`slimebus trainer` and `slimebus export`."""

import functools
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import click

from slimebus.cli.config import Resolved
from slimebus.cli.config.flags import ConfigCommand, config_argument, from_context


def foreign_flags() -> Mapping[str, str]:
    """Fields of megatron-core's configs and settings of the algorithms and corrections as flags, read from source without importing it."""
    from trainer.model.megatron_fields import megatron_fields
    from trainer.objective.plugin_settings import known_settings

    flags = {name.replace("_", "-"): f"megatron.{name}" for names in megatron_fields().values() for name in names}
    return flags | {name.replace("_", "-"): f"algorithm.settings.{name}" for name in known_settings()}


def algorithm_problems(resolved: Resolved) -> list[str]:
    """What only the chosen algorithm and corrections find wrong with the config."""
    from trainer.objective.choose import algorithm_problems

    return algorithm_problems(resolved)


@click.command(cls=ConfigCommand, foreign=foreign_flags, problems=algorithm_problems, short_help="Run the trainer of a run.")
@config_argument
@click.option("--broker", help="[address] Of the broker, tcp://HOST:PORT; default: broker.bind of the config.")
@click.pass_context
def trainer(ctx: click.Context, run_yaml: Path | None, broker: str | None) -> None:
    """Run the trainer: fetch batches, train, publish weights.

    With --nproc-per-node N above 1 it starts N ranks under torchrun; it may also be started by torchrun itself. It resumes
    from the newest checkpoint under the run directory. Any field of megatron-core's configs is accepted as a flag.
    """
    resolved = from_context(ctx, run_yaml)
    from trainer.process import launch_ranks, run_trainer

    if launch_ranks(resolved, sys.argv[1:]):
        return
    run_trainer(resolved, broker, debug=bool((ctx.obj or {}).get("debug")))


@click.command(cls=ConfigCommand, short_help="Write a checkpoint in Hugging Face layout.")
@config_argument
@click.option("--out", type=click.Path(path_type=Path), required=True, help="[path] Directory to write.")
@click.option("--step", type=click.IntRange(min=0), help="[step] Of the checkpoint: how many steps it has trained; default: the newest.")
@click.option("--force", is_flag=True, help="Replace a directory that is not empty.")
@click.pass_context
def export(ctx: click.Context, run_yaml: Path | None, out: Path, step: int | None, force: bool) -> None:
    """Write the newest checkpoint, or that of --step, as a Hugging Face directory: safetensors, config and tokenizer."""
    resolved = from_context(ctx, run_yaml)
    from trainer.process import check_export, export_checkpoint, launch_ranks

    is_first = os.environ.get("RANK", "0") == "0"
    if is_first:
        check_export(resolved, out, step, force=force)
    if launch_ranks(resolved, sys.argv[1:]):
        return
    say = functools.partial(click.echo, err=True) if is_first else lambda text: None
    exported = export_checkpoint(resolved, out, step, say)
    if exported is not None:
        click.echo(f"step {exported} written to {out}")
