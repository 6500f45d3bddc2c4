"""`slimebus simulate`: what a run would come to, before anything is spent on it."""

import itertools
import json
import math
import textwrap
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from broker.simulate.workload import LONGEST, Workload, lognormal_lengths
from slimebus.bus.errors import ConfigError, DataError, UsageError
from slimebus.config.schema import fields_of
from slimebus.telemetry.formatting import align_columns

if TYPE_CHECKING:
    from broker.simulate.simulated_run import SimulationOutcome

VARIED = [field for field in fields_of(Workload) if field.name != "lengths"]
"""Fields that are options: one value, or several with commas."""
SHOWN: "dict[str, Callable[[SimulationOutcome], str]]" = {
    "steps/s": lambda o: f"{o.steps_per_s:.3g}",
    "tokens/s": lambda o: f"{o.tokens_per_s:.0f}",
    "trainer idle": lambda o: f"{o.trainer_idle:.0%}",
    "workers idle": lambda o: f"{o.worker_idle:.0%}",
    "mean lag": lambda o: f"{o.lag_mean:.2f}",
    "wasted tokens": lambda o: f"{o.wasted_tokens:.1%}",
}
ENOUGH = 0.05
"""A trainer that waits for less of its time is the bottleneck."""
FEW_STEPS = 30
"""A run of fewer does not tell how fast it goes."""
MOST_WORKERS = 4096
WIDTH = 120


def _options(command: Callable[..., Any]) -> Callable[..., Any]:
    for field in reversed(VARIED):
        command = click.option(f"--{field.name.replace('_', '-')}", help=f"[{field.unit}] {field.meaning}")(command)
    return command


@click.command()
@click.option(
    "--from",
    "run_dir",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="[path] A run's directory to take all values from.",
)
@click.option("--mean-length", type=float, help="[tokens] Of a sample.")
@click.option("--length-sigma", default=0.6, show_default=True, help="[ratio] Deviation of the logarithm of lengths.")
@click.option("--max-length", default=LONGEST, help="[tokens] Where samples are cut.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line, with the histogram of lags.")
@_options
def simulate(
    run_dir: Path | None,
    mean_length: float | None,
    length_sigma: float,
    max_length: float,
    as_json: bool,
    **varied: str | None,
) -> None:
    """Play a run on a virtual clock: the broker's real decisions, with workers and trainer as timed models.

    Values are given, or measured in a run (--from); an option changes one of them, and with commas (--workers 1,2,4) every combination is
    played. Below the table stand how many workers the trainer could use, all values used, and with --from what the run measured beside
    what is predicted of it.
    """
    from broker.simulate.calibrate import calibrate, measure_run
    from broker.simulate.simulated_run import simulate as play

    given = {name: _values(name, text) for name, text in varied.items() if text is not None}
    base, itself = dict[str, Any](), dict[str, list[float]]()
    if run_dir is not None:
        try:
            calibrated = calibrate(run_dir, given.get("cores", [0])[0])
            base, of_run = msgspec.structs.asdict(calibrated), play(calibrated)
            itself = {"measured": [*measure_run(run_dir)], "predicted": [of_run.steps_per_s, of_run.lag_mean]}
        except (KeyError, TypeError, ValueError) as bad:  # JSON that is cut, rows without what they had to have
            raise DataError(f"{run_dir}: its records are damaged ({type(bad).__name__}: {bad}); take another run") from None
        if base["steps"] < FEW_STEPS:
            note = f"{run_dir} has {base['steps']} steps: too few to tell how fast it goes; take a run of 100 or so"
            click.echo(f"simulate: {note}", err=True)
    if mean_length is not None:
        base["lengths"] = lognormal_lengths(mean_length, length_sigma, max_length)
    elif run_dir is None:
        raise UsageError("give --from RUN_DIR of a run that exists, or at least --mean-length")
    played = []
    for values in itertools.product(*given.values()):
        workload = _workload(base | dict(zip(given, values, strict=True)))
        played.append((workload, play(workload)))
        if as_json:
            click.echo(json.dumps(_row(given, *played[-1]) | itself))
    varying = [name for name, values in given.items() if len(values) > 1]
    if not as_json:
        rows = [[*(f"{getattr(w, name):g}" for name in varying), *(text(o) for text in SHOWN.values())] for w, o in played]
        click.echo("\n".join(align_columns(rows, [*(name.replace("_", " ") for name in varying), *SHOWN])))
        click.echo(advice(*played[-1], lambda w: play(w).trainer_idle))
        click.echo(textwrap.fill(f"values: {_as_flags(played[-1][0], varying)}", WIDTH, break_on_hyphens=False))
    if itself and not as_json:
        found = (f"{name} {steps_per_s:.3g} steps/s, mean lag {lag:.2f}" for name, (steps_per_s, lag) in itself.items())
        click.echo(f"{run_dir} itself: {', '.join(found)}")


def _values(name: str, text: str) -> list[float]:
    try:
        return [int(word) if word.isdecimal() else float(word) for word in text.split(",")]
    except ValueError:
        raise UsageError(f"--{name.replace('_', '-')} {text!r}; expected a number, or several with commas") from None


def _workload(values: dict[str, Any]) -> Workload:
    try:
        return Workload(**values)
    except ConfigError as bad:  # it begins with the name of the field
        name, _, problem = bad.text.partition(" ")
        raise ConfigError(f"--{name.replace('_', '-')} {problem}") from None


def _as_flags(workload: Workload, left_out: list[str]) -> str:
    """Every value of a workload as on the command line, but those left out; of the lengths the least, the longest and the mean."""
    flags = (f"--{f.name.replace('_', '-')} {getattr(workload, f.name):g}" for f in VARIED if f.name not in left_out)
    least, *_, longest = 2 * workload.lengths
    return f"{' '.join(flags)}; lengths {least:.4g} to {longest:.4g} with a mean of {workload.mean_length:.4g} tokens"


def _row(given: dict[str, list[float]], workload: Workload, outcome: "SimulationOutcome") -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(outcome, str_keys=True)
    values = {name: None if value == math.inf else value for name, value in msgspec.to_builtins(workload).items()}  # JSON has no infinity
    return {name: values[name] for name in given} | found | {"values": values}


def advice(workload: Workload, outcome: "SimulationOutcome", idle_of: Callable[[Workload], float]) -> str:
    """How many workers to add before the trainer is the bottleneck. idle_of: the trainer's idle share in a simulation."""

    def is_enough(workers: int) -> bool:
        return idle_of(msgspec.structs.replace(workload, workers=workers)) <= ENOUGH

    if outcome.trainer_idle <= ENOUGH:
        return f"The trainer is the bottleneck: it waits {outcome.trainer_idle:.0%} of the time, workers {outcome.worker_idle:.0%}."
    waits = f"The trainer waits {outcome.trainer_idle:.0%} of the time"
    most = 2 * workload.workers
    while not is_enough(most):
        most *= 2
        if most > MOST_WORKERS:
            return f"{waits}, and more workers do not change that: the bound or the batch does."
    added = bisect_left(range(most), True, lo=most // 2 + 1, key=is_enough) - workload.workers
    return f"{waits}: {added} more {'worker' if added == 1 else 'workers'} like these would make it the bottleneck."
