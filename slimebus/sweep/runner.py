"""Trials started, watched and recorded: each is a `slimebus up` of its own, in a normal run directory. What is done stays done.

FOLDER/trials/NAME/            the run directory
FOLDER/trials/NAME/trial.json  its options and what became of it
FOLDER/logs/NAME.log           all that its processes wrote
"""

import contextlib
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from slimebus.atomic_file import make_private, replacing
from slimebus.bus.errors import ConfigError, DataError, SlimebusError, UsageError
from slimebus.cli.commands.up import arguments_of
from slimebus.process.launch import SLIMEBUS, ChildProcess, ProcessGroup, locked, wait_until_left
from slimebus.sweep.plan import Sweep, Trial
from slimebus.view import report
from slimebus.view.report import main_dataset

POLL_S = 0.5
LEAVE_S = 30.0
"""In which the broker of a trial that was killed has left."""
NAME_MISTAKE = "did you mean"
"""In a problem that another trial could not be without: the sweep is refused, and not the trial alone."""


class TrialOutcome(msgspec.Struct, kw_only=True):
    """trial.json. starts: above 1 for a trial that was begun, killed and gone on with; seconds: of all of them."""

    condition: dict[str, str]
    options: dict[str, Any]
    seed: int
    state: Literal["new", "running", "done", "failed", "refused"] = "new"
    reason: str = ""
    starts: int = 0
    seconds: float = 0.0


def saved_outcome(run_dir: Path) -> TrialOutcome | None:
    """What trial.json says; None of a directory that has none. Raises DataError with its path when it is spoilt."""
    file = run_dir / "trial.json"
    try:
        return msgspec.convert(json.loads(file.read_bytes()), TrialOutcome) if file.is_file() else None
    except (msgspec.ValidationError, ValueError) as bad:
        raise DataError(f"{file} is spoilt ({bad}); remove it to begin this trial anew") from None


def read_outcome(sweep: Sweep, trial: Trial) -> TrialOutcome:
    """What became of it so far. Raises UsageError when it was begun with other options."""
    found = saved_outcome(sweep.run_dir(trial)) or TrialOutcome(condition=trial.condition, options=trial.options, seed=trial.seed)
    if found.options != trial.options:
        changed = sorted(n for n in found.options.keys() | trial.options if found.options.get(n) != trial.options.get(n))
        raise UsageError(f"{sweep.run_dir(trial)} was begun with another {', '.join(changed)}; give another sweep_dir, or remove it")
    return found


def write_outcome(sweep: Sweep, trial: Trial, outcome: TrialOutcome) -> None:
    """Replace trial.json in one move."""
    make_private(sweep.run_dir(trial))
    with replacing(sweep.run_dir(trial) / "trial.json") as file:
        file.write(json.dumps(msgspec.to_builtins(outcome), indent=1).encode())  # an option may be infinite


class Running(NamedTuple):
    """A trial under way, on one of the `parallel` shares of the machine."""

    trial: Trial
    child: ChildProcess
    share: int
    begun_at: float


class Runner:
    """Runs what is not over yet. say: told a line for each trial that begins or ends."""

    def __init__(self, sweep: Sweep, say: Callable[[str], None]) -> None:
        self.sweep, self.say = sweep, say
        self.outcomes = {trial.name: read_outcome(sweep, trial) for trial in sweep.trials}
        self.running: list[Running] = []

    def run(self) -> None:
        """Until every trial is over. Raises ConfigError before any starts when an option is no option or no trial could run.

        Raises UsageError while another process runs this sweep.
        """
        self.sweep.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.sweep.folder / "lock", 0.0) as is_ours:
            if not is_ours:
                raise UsageError(f"{self.sweep.folder}: another process runs this sweep")
            waiting = [trial for trial in self.sweep.trials if self.outcomes[trial.name].state in ("new", "running")]
            waiting = self._without_refused(waiting) if waiting else []
            with ProcessGroup(self.sweep.folder / "logs") as group:
                while waiting or self.running:
                    while waiting and len(self.running) < self.sweep.plan.parallel:
                        self._start(group, waiting.pop(0))
                    for running in list(self.running):
                        self._poll(group, running)
                    time.sleep(POLL_S)

    def _without_refused(self, waiting: list[Trial]) -> list[Trial]:
        problems = asked_refusals(self.sweep)
        every = list(dict.fromkeys(problem for found in problems.values() for problem in found))
        mistakes = [problem for problem in every if NAME_MISTAKE in problem]
        if mistakes or len(problems) == len(self.sweep.trials):
            raise ConfigError("\n".join(mistakes or every))
        for trial in waiting:
            if trial.name in problems:
                self._end(trial, "refused", "; ".join(problems[trial.name]))
        return [trial for trial in waiting if trial.name not in problems]

    def _start(self, group: ProcessGroup, trial: Trial) -> None:
        plan, outcome = self.sweep.plan, self.outcomes[trial.name]
        outcome.state, outcome.reason, outcome.starts = "running", "", outcome.starts + 1
        write_outcome(self.sweep, trial, outcome)
        wait_until_left(self.sweep.run_dir(trial), LEAVE_S)
        share = min(set(range(plan.parallel)) - {running.share for running in self.running})
        size = len(plan.gpus) // plan.parallel
        gpus = plan.gpus[share * size : (share + 1) * size]
        arguments = ["up", *arguments_of(self.sweep.base, self.sweep.flags(trial)), "--workers", str(plan.workers)]
        child = group.start(trial.name, arguments, {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else {})
        self.running.append(Running(trial, child, share, time.monotonic()))
        self.say(f"{self._heading(trial)} begins" + (f", start {outcome.starts}" if outcome.starts > 1 else ""))

    def _poll(self, group: ProcessGroup, running: Running) -> None:
        """Take it out where it has ended, with what it left behind."""
        code = running.child.process.poll()
        if code is None:
            return
        running.child.kill()
        group.children.remove(running.child)
        self.running.remove(running)
        outcome = self.outcomes[running.trial.name]
        outcome.seconds = round(outcome.seconds + time.monotonic() - running.begun_at, 1)
        self._end(running.trial, "failed" if code else "done", reason_in(running.child.log_file, code) if code else "")

    def scores(self, trial: Trial) -> report.Rows:
        """Its evaluations so far."""
        with contextlib.suppress(DataError):
            found = report.read_report(self.sweep.run_dir(trial))
            return found.evaluations(self.sweep.plan.score or main_dataset(row["dataset"] for row in found.evals))
        return []

    def _end(self, trial: Trial, state: Any, reason: str) -> None:
        outcome = self.outcomes[trial.name]
        outcome.state, outcome.reason = state, reason
        write_outcome(self.sweep, trial, outcome)
        rows = self.scores(trial)
        what = reason or (f"{rows[-1]['dataset']} {rows[-1]['mean_reward']:.3f}" if rows else "")
        self.say(f"{self._heading(trial)} {state} after {outcome.seconds:.0f} s" + (f": {what}" if what else ""))

    def _heading(self, trial: Trial) -> str:
        return f"[{self.sweep.trials.index(trial) + 1}/{len(self.sweep.trials)}] {trial.name}:"


def asked_refusals(sweep: Sweep) -> dict[str, list[str]]:
    """plan.py:refusals, from a process of its own. Raises SlimebusError when that fails."""
    command = [*SLIMEBUS, "sweep", str(sweep.file), "--check", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SlimebusError(f"the trials' configs could not be checked:\n{done.stderr[-2000:]}")
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def reason_in(log: Path, code: int) -> str:
    """The last words of the process that ended a run, from the output of `slimebus up`."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()[-100:] if line.strip()]
    ended = next((i for i, line in enumerate(lines) if line.endswith("; ending the others")), len(lines))
    role = lines[ended].removeprefix("slimebus: ").partition(" ")[0] if ended < len(lines) else ""
    own = [line.partition(" | ")[2] for line in lines[:ended] if line.startswith(f"{role} |")]
    return (own or lines or [f"exit code {code}"])[-1].removeprefix("slimebus: ")
