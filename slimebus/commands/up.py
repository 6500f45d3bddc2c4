"""`slimebus up`: a whole run on one machine."""

import signal
import sys
import time
from pathlib import Path

import click

from slimebus.config import Resolved
from slimebus.config.flags import META, ConfigCommand, config_argument, from_context
from slimebus.config.schema import OPEN_MAPS
from slimebus.errors import EXIT_FAILURE
from slimebus.launch import Child, Fleet, free_port
from slimebus.security.exposure import reachable

COLOURS = {"broker": "yellow", "trainer": "cyan", "rollout": "green"}
POLL_S = 0.2


@click.command(cls=ConfigCommand, short_help="Start a whole run on this machine.")
@config_argument
@click.option("--workers", default=1, show_default=True, help="[processes] Rollout workers to start.")
@click.pass_context
def up(ctx: click.Context, run_yaml: Path | None, workers: int) -> None:
    """Start broker, trainer and rollout workers of RUN.yaml on this machine, with one log.

    Every line carries the role that wrote it. Ctrl-C ends all of them within 5 s. When broker.bind has port 0 a free port is chosen.
    """
    resolved = from_context(ctx, run_yaml)
    with Fleet(resolved.run_dir / "logs", sink=show_line) as fleet:
        start_all(fleet, resolved, arguments_of(run_yaml, ctx.meta.get(META, {})), workers)
        sys.exit(watch(fleet))


def arguments_of(run_yaml: Path | None, flags: dict[str, object]) -> list[str]:
    """The same config for a child process, as its command line."""
    words = [str(run_yaml)] if run_yaml else []
    for name, value in flags.items():
        section, _, field = name.rpartition(".")
        flag = f"{section}-{field}" if section in OPEN_MAPS else field
        flag = flag.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", str(value)]
    return words


def start_all(fleet: Fleet, resolved: Resolved, arguments: list[str], workers: int) -> str:
    """Start one broker, one trainer and `workers` rollout workers; the broker's address."""
    address = resolved.config.broker.bind
    if address.endswith(":0"):
        address = f"{address[:-2]}:{free_port()}"
    fleet.start("broker", ["broker", *arguments, "--bind", address])
    reach = reachable(address)
    fleet.start("trainer", ["trainer", *arguments, "--broker", reach])
    for i in range(workers):
        fleet.start(
            "rollout" if i == 0 else f"rollout-{i + 1}", ["rollout", *arguments, "--broker", reach, "--worker-name", f"worker-{i + 1}"]
        )
    return reach


def watch(fleet: Fleet) -> int:
    """Wait until all children ended well, one failed, or a signal came; the exit code."""
    stop: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda got, _: stop.append(got))
    while not stop:
        failed = [child for child in fleet.ended() if child.process.returncode]
        if failed:
            click.echo(f"slimebus: {describe(failed[0])}; ending the others", err=True)
            code = failed[0].process.returncode
            return code if code > 0 else EXIT_FAILURE
        if len(fleet.ended()) == len(fleet.children):
            return 0
        time.sleep(POLL_S)
    return 130 if stop[0] == signal.SIGINT else 143


def describe(child: Child) -> str:
    """`trainer ended with code 1 (log: ...)`."""
    code = child.process.returncode
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    return f"{child.role} {how} (log: {child.log_file})"


def show_line(role: str, line: str) -> None:
    """One line of a child on our own output, its role in front in the role's colour."""
    click.echo(click.style(f"{role:>9} | ", fg=COLOURS.get(role.partition("-")[0], "white")) + line)
