"""`slimebus status`: what the broker knows of everyone."""

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slimebus.bus.errors import DataError, SlimebusError, Unreachable
from slimebus.bus.messages import Status, StatusReply
from slimebus.cli.config import Resolved
from slimebus.cli.config.flags import ConfigCommand, asks_broker, config_argument, from_context
from slimebus.cli.formatting import duration
from slimebus.client.connect import RESTART_S, broker_address, is_listening, visit
from slimebus.view import terminal
from slimebus.view.report import read_map

if TYPE_CHECKING:
    from slimebus.bus.transport.client import Client

EXIT_STALLED = 3
EXIT_UNREACHABLE = 4
FILE = "status.json"
OF_BROKER = {"run", "lineage", "state", "step", "version", "steps", "clients", "waste", "waiting"}
POLL_S, PLAIN_POLL_S = 1.0, 5.0
PATIENCE_S = 600.0
"""A watched run whose broker is silent for longer is given up."""


def ask_status(client: "Client", timeout_s: float) -> dict[str, Any]:
    """The broker's status as a map (docs/protocol.md). Raises SlimebusError."""
    reply = client.call(Status(), timeout_s=timeout_s)
    reply.expect(StatusReply)
    return dict(json.loads(bytes(reply.bulk[0])))


def last_status(run_dir: Path) -> dict[str, Any] | None:
    """What the broker of the run wrote when it ended; None when there is no such file, or another's."""
    found: dict[str, Any] = {}
    with contextlib.suppress(OSError, DataError):
        found = read_map(run_dir / FILE)
    return found if found.keys() >= OF_BROKER else None


class RunStatus:
    """The newest status of a run: its broker's, or, where none answers, the one that the broker wrote when it ended.

    broker: its address, where the user gave one. status: empty while nothing is known; made_at: when, in seconds since the epoch.
    problem: why the status is not of now; None when it is.
    """

    def __init__(self, resolved: Resolved, broker: str | None, *, what: str, timeout_s: float) -> None:
        self.resolved, self.broker, self.what, self.timeout_s = resolved, broker, what, timeout_s
        self.status: dict[str, Any] = {}
        self.made_at = time.time()
        self.problem: SlimebusError | None = None
        self._opened = contextlib.ExitStack()
        self._client: Client | None = None
        self._address = ""

    @property
    def is_over(self) -> bool:
        """Whether the run has finished."""
        return self.status.get("state") == "finished"

    def poll(self, patience_s: float = 0.0) -> None:
        """Ask the broker; one that was started again may have another address. patience_s: how long to wait until one listens."""
        try:
            if self._client is None:
                self._address = ""
                self._address = broker_address(self.resolved, self.broker)
                asked = visit(self.resolved, self._address, what=self.what, role="viewer", patience_s=patience_s)
                self._client = self._opened.enter_context(asked)
            self.status, self.made_at, self.problem = ask_status(self._client, self.timeout_s), time.time(), None
        except SlimebusError as bad:
            self.problem = bad
            self.close()
            if bad.code == "wrong_run" or not is_listening(self._address):  # one that listens and does not answer may be starting
                self._read_file()

    def close(self) -> None:
        """Leave the broker."""
        self._client = None
        self._opened.close()

    def _read_file(self) -> None:
        """Take the broker's file where it is newer than what is known, unless it may be of another run than the one at a given address."""
        found, expected = last_status(self.resolved.run_dir), self.resolved.expected_run
        if found is None or (self.broker and found["run"] != expected):
            return
        is_newer = (found["run"], found["lineage"]) == (self.status.get("run"), self.status.get("lineage"))
        if not self.status or (is_newer and found["step"] >= self.status["step"]):
            self.status, self.made_at = found, (self.resolved.run_dir / FILE).stat().st_mtime


@click.command(cls=ConfigCommand)
@config_argument
@asks_broker(5.0)
@click.option("--json", "as_json", is_flag=True, help="Print everything that the broker knows, as one JSON object.")
@click.option(
    "--watch", is_flag=True, help="Show the run as it goes, until it is over or Ctrl-C; where there is no terminal, a line each 5 s."
)
@click.pass_context
def status(ctx: click.Context, run_yaml: Path | None, broker: str | None, as_json: bool, watch: bool, timeout_s: float) -> None:
    """Show the step, reward and lag, every process and who waits for whom.

    Exit code 0 while the run moves or has finished, 3 when it is stalled (the first line names the role, the process and the reason),
    4 when no broker answers. Of a run whose broker has ended, the last status in its run directory is shown.
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
            problem = f"no answer for {duration(time.time() - run.made_at)}: {run.problem.text}" if run.problem else ""
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
    what = "the run is over" if run.is_over else "no broker runs; started again with the same run directory it goes on"
    return f"{what}. Its last status, {duration(time.time() - run.made_at)} old:"
