"""`slimebus trainer` and `slimebus export`."""

import functools
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slimebus.bus.errors import SlimebusError, UsageError
from slimebus.config import Resolved
from slimebus.config.flags import OF_RUN, ConfigCommand, ExternalOptions, config_argument, from_context, take_over_option

if TYPE_CHECKING:
    from trainer.launch.plan import NodeOptions

EAGER: dict[str, Any] = {"is_flag": True, "is_eager": True, "expose_value": False}


def external_options() -> ExternalOptions:
    """Fields of megatron-core's configs and settings of the algorithms and corrections as flags."""
    from trainer.arguments.command_line import TrainerOptions

    return TrainerOptions()


def show_megatron_help(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """The callback of --help-megatron."""
    if value and not ctx.resilient_parsing:
        from trainer.arguments.command_line import help_text

        click.echo_via_pager(help_text()) if sys.stdout.isatty() else click.echo(help_text())
        ctx.exit()


def node_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say which of several nodes this is."""
    options = (
        click.option("--nnodes", type=click.IntRange(min=1), help="[nodes] That the trainer runs on; the command is started on each."),
        click.option("--node-rank", type=click.IntRange(min=0), help="[number] Of this node, from 0; node 0 has rank 0."),
        click.option("--master-addr", help="[host] Name or address of node 0, as the other nodes reach it."),
        click.option("--master-port", type=click.IntRange(1, 65535), help="[port] Where node 0 waits for the others; default 29500."),
    )
    return functools.reduce(lambda made, option: option(made), reversed(options), function)


def node_of(ctx: click.Context) -> "NodeOptions":
    """What these options say."""
    from trainer.launch.plan import NodeOptions

    return NodeOptions(**{name: ctx.params[name] for name in ("nnodes", "node_rank", "master_addr", "master_port")})


def resolved_on_node(ctx: click.Context, run_yaml: Path | None) -> Resolved:
    """The config. Where it does not load, this node tells the other nodes and raises the error."""
    try:
        return from_context(ctx, run_yaml)
    except SlimebusError as bad:
        from trainer.main import tell_other_nodes

        tell_other_nodes(node_of(ctx), bad.text)
        raise


def algorithm_problems(resolved: Resolved) -> list[str]:
    """What only the chosen algorithm and corrections find wrong with the config."""
    from trainer.objective.build_objective import algorithm_problems

    return algorithm_problems(resolved)


@click.command(cls=ConfigCommand, external=external_options, problems=algorithm_problems)
@config_argument
@click.option("--broker", help=f"[address] Of the broker, tcp://HOST:PORT; default: {OF_RUN}.")
@click.option("--role", type=click.Choice(["policy", "critic"]), default="policy", show_default=True, help="[choice] What it trains.")
@click.option("--help-megatron", **EAGER, callback=show_megatron_help, help="Show Megatron's options, and exit.")
@click.option("--max-restarts", type=click.IntRange(min=0), default=0, help="[times] Start all ranks again when one of them fails.")
@click.option(
    "--replay",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="[path] Train on the groups of this folder (of `buffer export`, or a dump), without a broker; nothing is published or saved.",
)
@click.option("--from-step", type=click.IntRange(min=0), default=0, help="[step] Where a replay begins; default: the first of its folder.")
@click.option("--profile-steps", metavar="A:B", help="[steps] Trace steps A to B - 1 into RUN_DIR/profile; on CUDA with a memory snapshot.")
@take_over_option
@node_options
@click.pass_context
def trainer(
    ctx: click.Context,
    run_yaml: Path | None,
    broker: str | None,
    role: str,
    max_restarts: int,
    replay: Path | None,
    from_step: int,
    profile_steps: str | None,
    take_over: bool,
    **node: object,
) -> None:
    """Run the trainer: fetch batches, train, publish weights.

    With --role critic: read the same groups as a consumer, give each its values, learn returns; publish nothing (docs/critic.md).

    Start it once per node: it starts --nproc-per-node ranks there. Several nodes meet by --nnodes, --node-rank and --master-addr, or by
    what srun or torchrun have set. It resumes from the newest checkpoint under the run directory. Any field of megatron-core's configs
    is accepted as a flag (--help-megatron), and so are the settings of algorithms and corrections (docs/algorithms.md).
    """
    resolved = resolved_on_node(ctx, run_yaml)
    profile = steps_of(profile_steps) if profile_steps else None
    from trainer.main import Debugging, launch, run_critic, run_trainer

    debug = bool((ctx.obj or {}).get("debug"))
    launch(resolved, node_of(ctx), sys.argv[1:], max_restarts=max_restarts, debug=debug)
    if role == "critic":
        if replay or profile:
            raise UsageError("--replay and --profile-steps are of --role policy; leave them out")
        return run_critic(resolved, broker, take_over=take_over, debug=debug)
    run_trainer(resolved, broker, Debugging(replay, profile, run_yaml, from_step), take_over=take_over, debug=debug)


def steps_of(text: str) -> range:
    """The steps of A:B. Raises UsageError."""
    found = re.fullmatch(r"(\d+):(\d+)", text)
    steps = range(*map(int, found.groups())) if found else range(0)
    if not steps:
        raise UsageError(f"--profile-steps {text}: expected A:B, steps A to B - 1, such as 10:12")
    return steps


@click.command(cls=ConfigCommand, external=external_options)
@config_argument
@click.option("--out", type=click.Path(path_type=Path), required=True, help="[path] Directory to write.")
@click.option("--step", type=click.IntRange(min=0), help="[step] Of the checkpoint: how many steps it has trained; default: the newest.")
@click.option("--force", is_flag=True, help="Replace a directory that is not empty.")
@node_options
@click.pass_context
def export(ctx: click.Context, run_yaml: Path | None, out: Path, step: int | None, force: bool, **node: object) -> None:
    """Write the newest checkpoint, or that of --step, as a Hugging Face directory: safetensors, config and tokenizer."""
    resolved = resolved_on_node(ctx, run_yaml)
    from trainer.export import check_export, export_checkpoint
    from trainer.main import launch

    is_first = os.environ.get("RANK", os.environ.get("SLURM_PROCID", str(ctx.params["node_rank"] or 0))) == "0"
    if is_first:
        check_export(resolved, out, step, force=force)
    launch(resolved, node_of(ctx), sys.argv[1:])
    say = functools.partial(click.echo, err=True) if is_first else lambda text: None
    exported = export_checkpoint(resolved, out, step, say)
    if exported is not None:
        click.echo(f"step {exported} written to {out}")
