"""The supervisor of `slimebus up`: starts the processes of a run, shows it, and restarts a process that was killed or left too early."""

import contextlib
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import zmq
from rich.console import Console
from rich.live import Live
from rich.text import Text

from slimebus.atomic_file import make_private
from slimebus.bus.errors import EXIT_FAILURE, DataError, SlimebusError, UsageError
from slimebus.bus.transport.server import bind_socket
from slimebus.client.connect import connect_without_joining
from slimebus.config import Resolved
from slimebus.config.engine_plan import placement, visible
from slimebus.process.launch import ChildProcess, ProcessGroup, free_port, locked, wait_until_left
from slimebus.security.exposure import reachable
from slimebus.view import report, terminal
from slimebus.view.report import result_table
from slimebus.view.run_status import ask_status

if TYPE_CHECKING:
    from slimebus.bus.transport.client import Client

COLOURS = {"broker": "yellow", "trainer": "cyan", "critic": "magenta", "teacher": "blue", "rollout": "green"}
POLL_S, STATUS_EVERY_S, STATUS_TIMEOUT_S = 0.2, 0.5, 0.5
PLAIN_EVERY_S = 5.0
MIN_LINES = 14
"""Of the view, where the terminal has as many."""
CTRL_C_ECHO = 2
"""Columns left free: the ^C that a terminal echoes would begin a new line, and what is drawn could not be erased."""
EXIT_GRACE_S, BROKER_EXIT_GRACE_S = 3.0, 30.0
"""A process that left is looked at after so long: the others of a run that has finished are on their way out, too."""
MAX_RESTARTS = 3
LEAVE_S = 3.0
"""In which the broker of an `up` that was killed has left."""
UP_LOCK = "up.lock"
"""In the run directory: of two `up` that start at once, the trainer of one would take its place at the broker of the other."""


class Supervisor:
    """Broker, trainer and workers of one config, and consumers beside them. arguments: that config as a command line.

    consumers: by name, the words of the command that starts each. title: what the run is called on the terminal.
    quiet: lines of the processes go to their log files only. accepts_changes: see slimebus/config/saved.py:note_changes.
    """

    def __init__(
        self,
        resolved: Resolved,
        arguments: list[str],
        *,
        workers: int = 1,
        consumers: Mapping[str, list[str]] | None = None,
        title: str = "",
        quiet: bool = False,
        accepts_changes: bool = False,
    ) -> None:
        self.resolved, self.arguments, self.workers, self.quiet = resolved, arguments, workers, quiet
        self.consumers = consumers or {}
        self.broker_words = ["--accept-changes"] if accepts_changes else []
        self.console = Console(highlight=False)
        self.dataset = report.main_dataset(resolved.config.eval.datasets)
        self.title = title or resolved.config.name
        self.failed: ChildProcess | None = None
        self._restarts: Counter[str] = Counter()
        self._asked_at = self._shown_at = 0.0
        self._page = ""

    def run(self) -> int:
        """Run until all processes ended; the exit code: 0, that of the first that failed (`failed`), or 130 and 143 for a signal.

        Raises UsageError before anything is written or started where a broker, or another `up`, has the run directory.
        """
        run_dir = self.resolved.run_dir
        in_use = f"the run in {run_dir} is running: its %s has the folder open; end it first, or give another --name or --run-dir"
        if not wait_until_left(run_dir, LEAVE_S):
            raise UsageError(in_use % "broker")
        make_private(run_dir)
        with locked(run_dir / UP_LOCK, LEAVE_S) as is_ours:
            if not is_ours:
                raise UsageError(in_use % "`slimebus up`")
            return self._run_processes()

    def _run_processes(self) -> int:
        with ProcessGroup(self.resolved.run_dir / "logs", sink=None if self.quiet else self._show_line) as group:
            address = start_processes(group, self.resolved, self.arguments, self.workers, self.consumers, self.broker_words)
            with _signals() as stop, contextlib.ExitStack() as stack:
                client = self._connect(stack, address)
                live = stack.enter_context(Live(console=self.console, auto_refresh=False, transient=True))
                while not stop:
                    self.restart_killed(group)
                    ended = group.ended()
                    self.failed = next((child for child in ended if child.process.returncode), None)
                    if self.failed is not None or len(ended) == len(group.children):
                        break
                    if client is not None and time.monotonic() - self._asked_at >= STATUS_EVERY_S:
                        self._poll_status(group, client, live)
                    time.sleep(POLL_S)
            if stop:  # outside of _signals, so that a second Ctrl-C does not wait; the broker has a third, after the others
                group.stop(1.5 * self.resolved.config.trainer.stop_grace_s)
            if self.failed is not None:
                self._print(f"{describe_exit(self.failed)}; ending the others")
                return max(self.failed.process.returncode, EXIT_FAILURE)
        if stop:
            return 130 if stop[0] == signal.SIGINT else 143
        if self.console.is_terminal and not self.quiet:
            with contextlib.suppress(DataError):  # nothing was trained
                found = report.read_report(self.resolved.run_dir)
                self.console.print(result_table(report.make_result(found, self.dataset, self.resolved.config)))
        return 0

    def _connect(self, stack: contextlib.ExitStack, address: str) -> "Client | None":
        try:
            return stack.enter_context(connect_without_joining(self.resolved, address, what="up", role="viewer"))
        except SlimebusError as bad:
            self._print(f"the run is not watched: {bad.text}")
            return None

    def _poll_status(self, group: ProcessGroup, client: "Client", live: Live) -> None:
        """Show the run, and restart a process that left it too early."""
        self._asked_at = time.monotonic()
        status: dict[str, Any] | None = None
        with contextlib.suppress(SlimebusError):  # it starts, or has ended
            status = ask_status(client, timeout_s=STATUS_TIMEOUT_S) | {"run": self.title}
            self._show(status, live)
            if self.quiet and self._page != (url := report.page_url(self.resolved.run_dir)):
                self._page = url
                self._print(f"page: {url}")
        if (child := find_left_too_early(group.children, status)) is not None:
            self._restart(group, child, status)

    def _show(self, status: dict[str, Any], live: Live) -> None:
        is_supervised = self.resolved.config.algorithm.is_supervised
        if self.console.is_interactive:
            width, height = self.console.size
            height = min(height, max(MIN_LINES, height // 2))  # the log goes on above it
            width -= CTRL_C_ECHO
            live.update(terminal.screen(status, is_supervised=is_supervised, width=width, height=height), refresh=True)
        elif self.quiet and time.monotonic() - self._shown_at > PLAIN_EVERY_S:
            self._shown_at = time.monotonic()
            self.console.print(terminal.plain_line(status, is_supervised=is_supervised), soft_wrap=True, markup=False)

    def restart_killed(self, group: ProcessGroup) -> None:
        """Restart processes that a signal ended: the system short of memory, or a fault in native code. The run continues where it was."""
        for child in group.ended():
            if child.process.returncode < 0 and self._restarts[child.name] < MAX_RESTARTS:
                self._restarts[child.name] += 1
                self._print(f"{describe_exit(child)}; restarting it")
                group.restart(child)

    def _restart(self, group: ProcessGroup, child: ChildProcess, status: dict[str, Any] | None) -> None:
        self._restarts[child.name] += 1
        why = "; ".join(status["waiting"]) or status["state"] if status else "others of the run still work"
        left = f"although the run is not finished ({why})"
        if self._restarts[child.name] > MAX_RESTARTS:
            raise SlimebusError(f"{child.name} left {MAX_RESTARTS + 1} times {left}; its log: {child.log_file}")
        self._print(f"{child.name} left {left}; restarting it")
        group.restart(child)

    def _print(self, text: str) -> None:
        console = self.console if self.console.is_terminal else Console(stderr=True, highlight=False)
        console.print(f"slimebus: {text}", markup=False, soft_wrap=True)

    def _show_line(self, role: str, line: str) -> None:
        colour = COLOURS.get(role.partition("-")[0], "white")
        self.console.print(Text.assemble((f"{role:>9} | ", colour), line), soft_wrap=True)


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Inside, SIGINT and SIGTERM are only noted."""
    got: list[int] = []
    before = {number: signal.signal(number, lambda number, _: got.append(number)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield got
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def start_processes(
    group: ProcessGroup, resolved: Resolved, arguments: list[str], workers: int, consumers: Mapping[str, list[str]],
    broker_words: Sequence[str] = (),
) -> str:  # fmt: skip
    """Start one broker, one trainer, `workers` rollout workers and these consumers; the broker's address.

    Each sees the GPUs that trainer.gpus and engine.gpus give it. Raises UsageError before any of them where those do not go round, or when
    the address is in use: they would join the run of the other broker, and disturb it.
    """
    address = resolved.config.broker.bind
    if address.endswith(":0"):
        address = f"{address[:-2]}:{free_port()}"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        bind_socket(socket, address)
    children = {"trainer": ["trainer"], **consumers}
    children |= {f"rollout-{i}" if i > 1 else "rollout": ["rollout", "--worker-name", f"worker-{i}"] for i in range(1, workers + 1)}
    gpus = placement(resolved.config, list(children))
    group.start("broker", ["broker", *arguments, "--bind", address, *broker_words])
    reach = reachable(address)
    for name, (role, *options) in children.items():
        own = gpus.get(name, ())
        placed = with_gpus(arguments, "--trainer-gpus" if role == "trainer" else "--engine-gpus", own)
        group.start(name, [role, *placed, *options, "--broker", reach], visible(own))
    return reach


def with_gpus(arguments: list[str], flag: str, gpus: Sequence[int]) -> list[str]:
    """The command line with these GPUs instead of those that the flag names in it."""
    if not gpus:
        return arguments
    at = arguments.index(flag) if flag in arguments else len(arguments)
    return [*arguments[:at], *arguments[at + 2 :], flag, ",".join(map(str, gpus))]


def find_left_too_early(children: Sequence[ChildProcess], status: dict[str, Any] | None) -> ChildProcess | None:
    """A process that ended without an error although the run needs its role, which no other process has.

    A worker that joined a finished run leaves; when the trainer goes on with more steps, none is there. status: the
    broker's; None when it does not answer.
    """
    now = time.monotonic()
    for child in children:
        role, gone_s = child.name.partition("-")[0], now - child.ended_at if child.ended_at else 0.0
        if role == "broker":
            if gone_s > BROKER_EXIT_GRACE_S and any(not other.ended_at for other in children):
                return child
        elif gone_s > EXIT_GRACE_S and status is not None and _is_needed(role, status["state"]):
            present = {c["role"] for c in status["clients"] if c["state"] not in ("gone", "fenced")}
            running = {other.name.partition("-")[0] for other in children if not other.ended_at}
            if role not in present | running:
                return child
    return None


def _is_needed(role: str, state: str) -> bool:
    """A finished run needs nobody; one that evaluates its last version needs no trainer, which has served it for long when it leaves."""
    return state != "finished" and (role, state) != ("trainer", "evaluating")


def describe_exit(child: ChildProcess) -> str:
    """`trainer ended with code 1 (log: ...)`."""
    code = child.process.returncode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    return f"{child.name} {how} (log: {child.log_file})"
