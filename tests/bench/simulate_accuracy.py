"""What `slimebus simulate --from` predicts of other runs, beside what these runs measured.

    python tests/bench/simulate_accuracy.py --folder runs/accuracy        a table in Markdown; runs that are there are not made again

Every run is a short one of the quick start on this machine. The first is the one that is calibrated from; the others differ in bound,
workers or batch.
"""

import statistics
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec
import quickstart_run
from bench_row import Row, within
from quickstart_run import Measured

from broker.simulate.calibrate import calibrate
from broker.simulate.closed_form import mean_staleness
from broker.simulate.simulated_run import simulate

STEPS = 40
CONFIGURATIONS = [(2, 1, 32), (0, 1, 32), (1, 1, 32), (4, 1, 32), (2, 2, 32), (2, 1, 16), (2, 1, 64), (0, 2, 32), (4, 2, 16)]
"""eta, workers, batch; the first is calibrated from."""


class Predicted(NamedTuple):
    """One configuration: what was measured, simulated, and the closed form."""

    name: str
    measured: Measured
    steps_per_s: float
    lag_mean: float
    formula: float

    @property
    def errors(self) -> list[float]:
        """Of steps/s and, where there is any, of the mean lag; relative."""
        pairs = [(self.steps_per_s, self.measured.steps_per_s), (self.lag_mean, self.measured.lag_mean)]
        return [abs(said - was) / was for said, was in pairs if was]


def predict(folder: Path, steps: int = STEPS, configurations: list[tuple[int, int, int]] = CONFIGURATIONS) -> list[Predicted]:
    """Make the runs, and predict each from the first."""
    made = {c: _measured(folder, steps, *c) for c in configurations}
    base = calibrate(made[configurations[0]].run_dir)
    found = []
    for (eta, workers, batch), measured in made.items():
        workload = msgspec.structs.replace(base, max_staleness=eta, workers=workers, batch=batch)
        outcome = simulate(workload)
        name = f"eta {eta}, {workers} worker{'s' * (workers > 1)}, batch {batch}"
        found.append(Predicted(name, measured, outcome.steps_per_s, outcome.lag_mean, mean_staleness(workload)))
    return found


def _measured(folder: Path, steps: int, eta: int, workers: int, batch: int) -> Measured:
    name = f"eta{eta}-workers{workers}-batch{batch}"
    file = folder / f"{name}.json"
    if not file.is_file():
        changes: dict[str, Any] = {"broker.max_staleness": eta, "rollout.rollout_batch_size": batch}
        measured = quickstart_run.run(folder, name, steps, changes, workers=workers)
        file.write_bytes(msgspec.json.encode(measured._replace(run_dir=str(measured.run_dir))))  # type: ignore[arg-type]
    run_dir, *values = msgspec.json.decode(file.read_bytes())
    return Measured(Path(run_dir), *values)


def rows(found: list[Predicted]) -> list[Row]:
    """The median error over the runs that were not calibrated from."""
    errors = [error for one in found[1:] for error in one.errors]
    return [within("simulate_error", statistics.median(errors), f"median of {len(errors)} errors", "<=", 0.10)]


def markdown(found: list[Predicted]) -> str:
    """A line for each run."""
    lines = [
        "| run | steps/s measured | predicted | error | mean lag measured | predicted | error | formula |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        shown = [f"{error:.0%}" for error in one.errors] + [""]
        pace = [f"{one.measured.steps_per_s:.2f}", f"{one.steps_per_s:.2f}", shown[0]]
        lag = [f"{one.measured.lag_mean:.2f}", f"{one.lag_mean:.2f}", shown[1], f"{one.formula:.2f}"]
        lines.append("| " + " | ".join([one.name, *pace, *lag]) + " |")
    return "\n".join(lines)


@click.command()
@click.option("--folder", type=click.Path(path_type=Path), default=Path("runs/accuracy"), help="[path] Of the runs.")
@click.option("--steps", default=STEPS, help="[steps] Of each run.")
def main(folder: Path, steps: int) -> None:
    """Print the table and the median error."""
    found = predict(folder.resolve(), steps)
    click.echo(markdown(found))
    click.echo(f"{rows(found)[0]['value']:.1%}")


if __name__ == "__main__":
    main()
