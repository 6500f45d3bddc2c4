"""`slimebus status`: what the broker knows of everyone."""

import contextlib
import json
import sys
import time
from pathlib import Path

import click

from slimebus.bus.errors import Unreachable
from slimebus.client.connect import RESTART_S
from slimebus.config.flags import ConfigCommand, asks_broker, config_argument, from_context
from slimebus.telemetry.formatting import format_duration
from slimebus.view import terminal
from slimebus.view.run_status import RunStatus, last_status

EXIT_STALLED = 3
EXIT_UNREACHABLE = 4
POLL_S, PLAIN_POLL_S = 1.0, 5.0
PATIENCE_S = 600.0
"""A watched run is given up when its broker is silent for longer."""


@click.command(cls=ConfigCommand)
@config_argument
@asks_broker(5.0)
@click.option("--json", "as_json", is_flag=True, help="Print everything that the broker knows, as one JSON object.")
@click.option(
    "--watch", is_flag=True, help="Show the run as it goes, until it is over or Ctrl-C; where there is no terminal, a line each 5 s."
)
@click.pass_context
def status(ctx: click.Context, run_yaml: Path | None, broker: str | None, as_json: bool, watch: bool, timeout_s: float) -> None:
    """Show the step, reward and lag, every process and what it waits for.

    Exit code 0 while the run moves or has finished, 3 when it is stalled (the first line names the role, the process and the reason),
    4 when no broker answers. When the broker has ended, the last status in the run directory is shown.
    """
    resolved = from_context(ctx, run_yaml)
    is_supervised = resolved.config.algorithm.is_supervised
    run = RunStatus(resolved, broker, what="status", timeout_s=timeout_s)
    with contextlib.closing(run):
        run.poll(0.0 if not broker and last_status(resolved.run_dir) else min(timeout_s, RESTART_S))
        if watch and run.problem is None:
            _watch(run, is_supervised=is_supervised)
    if run.problem is not None:
        _report_problem(run)
    lines = [] if run.problem is None else [_heading(run)]
    if as_json:
        click.echo(json.dumps(run.status, indent=2))
    else:
        click.echo("\n".join([*lines, *terminal.brief(run.status, is_supervised=is_supervised)]))
    if run.problem is not None and not run.is_over:
        sys.exit(EXIT_UNREACHABLE)
    if run.problem is None and run.status["stalled"]:
        sys.exit(EXIT_STALLED)


def _watch(run: RunStatus, *, is_supervised: bool) -> None:
    """Show the run until it is over, or its broker has been silent for too long."""
    from rich.console import Console
    from rich.live import Live

    console, answered_at = Console(highlight=False), time.monotonic()
    with Live(console=console, auto_refresh=False, screen=True) if console.is_interactive else contextlib.nullcontext() as live:
        while not run.is_over and time.monotonic() - answered_at < PATIENCE_S:
            problem = f"no answer for {format_duration(time.time() - run.made_at)}: {run.problem.text}" if run.problem else ""
            if live is None:
                line = f"{run.status['run']}: {problem}" if problem else terminal.plain_line(run.status, is_supervised=is_supervised)
                console.print(line, soft_wrap=True, markup=False)
            else:
                width, height = console.size
                view = terminal.screen(run.status, is_supervised=is_supervised, width=width, height=height, problem=problem)
                live.update(view, refresh=True)
            time.sleep(PLAIN_POLL_S if live is None else POLL_S)
            run.poll()
            if run.problem is None:
                answered_at = time.monotonic()
            elif not isinstance(run.problem, Unreachable):
                return


def _report_problem(run: RunStatus) -> None:
    """Say why no broker answers, where the file alone does not tell; raise what the user has to mend."""
    problem = run.problem
    assert problem is not None
    if not isinstance(problem, Unreachable) and (problem.code != "wrong_run" or not run.status):
        raise problem
    if run.broker or problem.code == "wrong_run" or not run.status:
        run_dir = run.resolved.run_dir
        hint = "" if run.broker or run_dir.exists() else f"; there is no run at {run_dir} either"
        click.echo(f"slimebus: {problem.text}{hint}", err=True)
    if not run.status:
        sys.exit(EXIT_UNREACHABLE)


def _heading(run: RunStatus) -> str:
    what = "the run is over" if run.is_over else "no broker runs; restart it with the same run directory to resume the run"
    return f"{what}. Its last status, {format_duration(time.time() - run.made_at)} old:"
