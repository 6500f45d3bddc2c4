"""Broker, trainer and worker leave a run in some order, the first of them in good order or by kill -9: each exit code says how, in time.

`bin/chaos --leaving` runs every order.
"""

import itertools
import signal
import subprocess
from pathlib import Path

from live_run import Process, Run

ROLES = ("broker", "trainer", "rollout")
ORDERS = tuple(itertools.permutations(ROLES))
LEAVE_S = 60.0
"""In which a process ends, whoever has left before; a machine under load takes several times as long as an idle one."""


def leave(folder: Path, task: Path, order: tuple[str, ...], first: signal.Signals) -> list[str]:
    """What was not as it should be: the first role gets `first`, the others SIGTERM, each once the one before has ended."""
    with Run(folder, task, rollout__num_rollout=1_000_000) as run:
        processes = dict(zip(ROLES, run.start_all(), strict=True))
        run.wait_for("a trained step", lambda s: s["step"] >= 1)
        signals = [first, *[signal.SIGTERM] * (len(order) - 1)]
        problems = [_end(role, processes[role], number) for role, number in zip(order, signals, strict=True)]
        left = [" ".join(process.cmdline()) for process in run.alive()]
        return [*filter(None, problems), *(f"{command} is left over" for command in left)]


def _end(role: str, process: Process, number: signal.Signals) -> str:
    expected = -number if number == signal.SIGKILL else 0
    process.expected.add(expected)
    process.send(number)
    try:
        code = process.popen.wait(LEAVE_S)
    except subprocess.TimeoutExpired:
        return f"{role} still runs {LEAVE_S:.0f} s after {number.name}\n{process.tail()}"
    return "" if code == expected else f"{role} ended with {code} after {number.name}, expected {expected}\n{process.tail()}"
