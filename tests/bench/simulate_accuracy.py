"""What `slimebus simulate --from` predicts of other runs, beside what these runs measured.

    python tests/bench/simulate_accuracy.py --folder runs/accuracy        a table in Markdown; runs that are there are not made again

Every run is a short one of the quick start on this machine. The first is the one that is calibrated from; the others differ from it.
"""

import os
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

import click
import msgspec

sys.path.insert(0, str(Path(__file__).parents[1] / "fixtures"))

import quickstart_run
from bench_row import Row, within
from quickstart_run import Measured

from broker.simulate.calibrate import calibrate
from broker.simulate.simulated_run import simulate

STEPS, BASE_STEPS = 30, 120
"""Of a predicted run; of the one that is calibrated from, which must tell a step's fixed time from that of its tokens."""
BASE = {"max_staleness": 2, "workers": 1, "batch": 32, "groups_per_worker": 32, "eval_interval": 10}
CONFIGURATIONS: list[dict[str, int]] = [
    {},
    {"max_staleness": 0},
    {"max_staleness": 1},
    {"max_staleness": 4},
    {"batch": 16},
    {"batch": 64},
    {"workers": 2},
    {"workers": 2, "max_staleness": 0},
    {"workers": 2, "batch": 16, "max_staleness": 4},
    {"max_staleness": 8, "eval_interval": 2},
    {"max_staleness": 8, "eval_interval": 4, "groups_per_worker": 64},
]
"""Of the predicted runs; the first is calibrated from. In the last two evaluations make the workers the slower side."""
OPTIONS = {
    "max_staleness": "broker.max_staleness",
    "batch": "rollout.rollout_batch_size",
    "groups_per_worker": "rollout.max_running_groups",
    "eval_interval": "eval.eval_interval",
}


class Predicted(NamedTuple):
    """One run: what was measured and what was simulated."""

    name: str
    measured: Measured
    steps_per_s: float
    lag_mean: float

    @property
    def errors(self) -> list[float]:
        """Of steps/s and, where there is any, of the mean lag; relative."""
        pairs = [(self.steps_per_s, self.measured.steps_per_s), (self.lag_mean, self.measured.lag_mean)]
        return [abs(said - was) / was for said, was in pairs if was]


def predict(folder: Path, steps: int = STEPS, configurations: list[dict[str, int]] = CONFIGURATIONS) -> list[Predicted]:
    """Make the runs, and predict each from the first."""
    made = [_measured(folder, steps if changes else steps * BASE_STEPS // STEPS, changes) for changes in configurations]
    base = calibrate(made[0].run_dir, _cores(made[0]))
    found = []
    for changes, measured in zip(configurations, made, strict=True):
        cores = _cores(measured if changes.get("max_staleness") != 0 else made[0]) if base.cores else 0
        workload = msgspec.structs.replace(base, **changes, cores=cores, steps=steps if changes else base.steps)
        outcome = simulate(workload)
        found.append(Predicted(_name(changes), measured, outcome.steps_per_s, outcome.lag_mean))
    return found


def _cores(measured: Measured) -> float:
    """What others left of this machine. On-policy it is more: they use what the run itself leaves idle."""
    return (os.cpu_count() or 1) - measured.foreign


def _name(changes: dict[str, int]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in (changes or BASE).items())


def _measured(folder: Path, steps: int, changes: dict[str, int]) -> Measured:
    name = "-".join(f"{name}-{value}" for name, value in changes.items()) or "base"
    file = folder / f"{name}.json"
    if not file.is_file():
        options = {OPTIONS[name]: value for name, value in (BASE | changes).items() if name in OPTIONS}
        measured = quickstart_run.run(folder, name, steps, options, workers=changes.get("workers", 1))
        file.write_bytes(msgspec.json.encode([str(measured.run_dir), *measured[1:]]))
    run_dir, *values = msgspec.json.decode(file.read_bytes())
    return Measured(Path(run_dir), *values)


def rows(found: list[Predicted]) -> list[Row]:
    """The median error over the runs that were not calibrated from."""
    errors = [error for one in found[1:] for error in one.errors]
    return [within("simulate_error", statistics.median(errors), f"median of {len(errors)} errors", "<=", 0.10)]


def markdown(found: list[Predicted]) -> str:
    """A line for each run."""
    heads = ("run", "steps/s measured", "predicted", "error", "mean lag measured", "predicted", "error")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for one in found:
        shown = [f"{error:.0%}" for error in one.errors] + [""]
        pace = [f"{one.measured.steps_per_s:.2f}", f"{one.steps_per_s:.2f}", shown[0]]
        lag = [f"{one.measured.lag_mean:.2f}", f"{one.lag_mean:.2f}", shown[1]]
        lines.append("| " + " | ".join([one.name, *pace, *lag]) + " |")
    return "\n".join(lines)


@click.command()
@click.option("--folder", type=click.Path(path_type=Path), default=Path("runs/accuracy"), help="[path] Of the runs.")
@click.option("--steps", default=STEPS, help="[steps] Of each run.")
def main(folder: Path, steps: int) -> None:
    """Print the table and the median error."""
    found = predict(folder.resolve(), steps)
    click.echo(markdown(found))
    click.echo(
        f"median error {rows(found)[0]['value']:.1%}; cores that others used: {max(one.measured.foreign for one in found):.2f} at most"
    )


if __name__ == "__main__":
    main()
