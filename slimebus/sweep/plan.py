"""sweep.yaml: a base run.yaml, what is tried, with which seeds and resources; and the trials that follow from it."""

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from slimebus.config.convert import Converter, nearest, nearest_of
from slimebus.config.field_rules import evaluation_problems
from slimebus.config.file_checks import file_problems
from slimebus.config.load import raise_all, read, read_map, without
from slimebus.config.schema import OPEN_MAPS, Natural, Processes, Section, paths

OWN = ("seed", "run_dir", "name")
"""Options that the sweep sets for each trial."""


class SweepPlan(Section, frozen=True):
    """What a sweep.yaml says."""

    run: str
    """[path] The run.yaml that all trials begin with; relative to the sweep.yaml."""
    sweep_dir: str = ""
    """[path] Where trials and report are kept, relative to the current directory; empty: runs/NAME of the sweep.yaml."""
    set: dict[str, Any] = {}
    """[map] Options of all trials, by their dotted names."""
    grid: dict[str, Any] = {}
    """[map] Axes, all combined: an option with a list of values; or any name with a map, label to the options that it stands for."""
    cases: list[dict[str, Any]] = []
    """[list] Combinations of options one by one, beside the grid; a `name` in it is its label."""
    seeds: list[Natural] = msgspec.field(default_factory=lambda: [0])
    """[list] One trial of every combination for each."""
    axis: str = ""
    """[name] The axis to find the smallest value of; empty: broker.max_staleness where it is one, else the last axis."""
    score: str = ""
    """[name] The evaluation that trials are compared by; empty: heldout, or the first one."""
    workers: Processes = 1
    """[processes] Rollout workers of each trial."""
    parallel: Processes = 1
    """[trials] At the same time."""
    gpus: list[Natural] = []
    """[list] Numbers of GPUs, dealt evenly to the trials that run at the same time (CUDA_VISIBLE_DEVICES)."""


class Trial(msgspec.Struct, frozen=True):
    """One run of a sweep. condition: axis -> label, the same for all its seeds; options: dotted name -> value."""

    name: str
    condition: dict[str, str]
    options: dict[str, Any]
    seed: int


class Sweep(msgspec.Struct, frozen=True):
    """A plan and where it is. trials: those of the first seed go first, of them those of the first value of the first axis."""

    file: Path
    plan: SweepPlan
    base: Path
    folder: Path
    trials: list[Trial]

    @property
    def conditions(self) -> list[Trial]:
        """A trial of each combination of options."""
        return [trial for trial in self.trials if trial.seed == self.plan.seeds[0]]

    def run_dir(self, trial: Trial) -> Path:
        """The trial's own."""
        return self.folder / "trials" / trial.name

    def flags(self, trial: Trial) -> dict[str, Any]:
        """All that differs from the base, as flags of `slimebus up`: dotted name -> value."""
        made = {"seed": trial.seed, "run_dir": str(self.run_dir(trial)), "name": f"trial-{xxhash.xxh3_64_hexdigest(trial.name.encode())}"}
        return {name: _typed(name, value) for name, value in ({"broker.bind": "tcp://127.0.0.1:0"} | trial.options | made).items()}


def load(file: Path) -> Sweep:
    """The sweep of a file. Raises ConfigError with every mistake in it: keys, options that do not exist, values that no run could have."""
    problems: list[str] = []
    tree, origin = read_map(file, problems)
    plan: SweepPlan = Converter(origin, problems).struct(SweepPlan, tree, "")
    raise_all(problems)
    axes = _axes(plan, problems)
    trials = [_trial(plan, axes, chosen, seed) for seed in plan.seeds for chosen in itertools.product(*axes.values())]
    sweep = Sweep(
        file=file,
        plan=plan,
        base=file.parent / plan.run,
        folder=Path(plan.sweep_dir or f"runs/{file.stem}").resolve(),
        trials=trials,
    )
    problems += _contradictions(plan, axes)
    problems += [f"two trials are called {name}" for name, n in Counter(trial.name for trial in trials).items() if n > 1]
    problems += [_unknown(name) for name in sorted({name for trial in trials for name in trial.options}) if not is_option(name)]
    raise_all([f"{file}: {problem}" for problem in problems])
    for trial in sweep.conditions:
        resolved, found, broken = read(sweep.base, sweep.flags(trial))
        raise_all([f"{file}: {problem}" for problem in found if broken])
        if plan.score and plan.score not in (names := resolved.config.eval.datasets):
            raise_all([f"{file}: score: {plan.score!r} is no evaluation of {sweep.base}{nearest_of(plan.score, list(names))}"])
    return sweep


def is_option(name: str) -> bool:
    """Whether a trial can be given it: a field of the config, or a key of an open map."""
    return (name in paths() and name not in (*OWN, "eval.datasets")) or name.rpartition(".")[0] in OPEN_MAPS


def _unknown(name: str) -> str:
    return f"{name}: the sweep sets it for each trial" if name in OWN else f"no option {name!r}{nearest(name)}"


def _contradictions(plan: SweepPlan, axes: Mapping[str, Any]) -> Iterator[str]:
    if plan.axis and plan.axis not in axes:
        yield f"axis: no {plan.axis!r} in grid{nearest_of(plan.axis, list(axes))}"
    if not plan.seeds:
        yield "seeds: none; expected at least one, such as [0]"
    if len(plan.gpus) % plan.parallel:
        yield f"gpus: {len(plan.gpus)} cannot be dealt evenly to {plan.parallel} trials at a time (parallel)"


Choice = tuple[str, dict[str, Any]]
"""A value of an axis: its label, and the options that it stands for."""


def _axes(plan: SweepPlan, problems: list[str]) -> dict[str, list[Choice]]:
    """The axes in order of the file, those of the grid before `cases`."""
    axes: dict[str, list[Choice]] = {}
    for name, values in plan.grid.items():
        if isinstance(values, list) and values:
            axes[name] = [(label_of(value), {name: value}) for value in values]
        elif isinstance(values, dict) and values and all(isinstance(options, dict) for options in values.values()):
            axes[name] = [(str(label), options) for label, options in values.items()]
        else:
            problems.append(f"grid.{name}: expected a list of values, or a map of labels to maps of options")
    if plan.cases:
        named = [({key: value for key, value in case.items() if key != "name"}, case.get("name")) for case in plan.cases]
        axes["case"] = [
            (str(label or ", ".join(f"{key.rpartition('.')[2]}={label_of(value)}" for key, value in options.items()) or "base"), options)
            for options, label in named
        ]
    return axes


def label_of(value: Any) -> str:
    """How a value of an option is written in labels and names."""
    if isinstance(value, list):
        return "+".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _trial(plan: SweepPlan, axes: Mapping[str, Any], chosen: Sequence[Choice], seed: int) -> Trial:
    condition = {axis: label for axis, (label, _) in zip(axes, chosen, strict=True)}
    options = dict(plan.set)
    for _, own in chosen:
        options |= own
    parts = [f"{axis.rpartition('.')[2]}={label}" for axis, label in condition.items()]
    name = re.sub(r"[^A-Za-z0-9._=,+-]+", "-", ",".join([*parts, f"seed={seed}"]))
    return Trial(name=name, condition=condition, options=options, seed=seed)


def _typed(name: str, value: Any) -> Any:
    """As `slimebus up` takes it on its command line: text for a list or a value of an open map."""
    if name.rpartition(".")[0] in OPEN_MAPS:
        return json.dumps(value)
    return ",".join(map(str, value)) if isinstance(value, list) else value


def refusals(sweep: Sweep) -> dict[str, list[str]]:
    """Trial -> what in its config is wrong, for those that no process could run. Loads hooks and plug-ins: for a process of its own."""
    found: dict[str, list[str]] = {}
    for trial in sweep.conditions:
        resolved, problems, broken = read(sweep.base, sweep.flags(trial))
        problems = [*problems, *without(broken, [*evaluation_problems(resolved.config), *file_problems(resolved)])]
        found |= {other.name: problems for other in sweep.trials if other.condition == trial.condition and problems}
    return found
