"""`slimebus trace`: the timeline of a run."""

import json
from pathlib import Path
from typing import Any

import click

from slimebus.errors import UsageError


@click.command()
@click.argument("run_dirs", nargs=-1, required=True, metavar="RUN_DIR...", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="[path] Write Chrome trace events here: open it in ui.perfetto.dev.")
@click.option("--plot", type=click.Path(path_type=Path), help="[path] Draw a few steps here (PNG).")
@click.option("--begin-s", type=click.FloatRange(min=0), help="[seconds] Where the picture begins; default: four steps from the middle.")
@click.option("--end-s", type=click.FloatRange(min=0), help="[seconds] Where the picture ends.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def trace(
    run_dirs: tuple[Path, ...], out: Path | None, plot: Path | None, begin_s: float | None, end_s: float | None, as_json: bool
) -> None:
    """Show what trainer and workers did at the same time: steps, publishing, pulls, loads, sampled groups.

    RUN_DIR is a run's directory, one for each host of the run; times of several hosts are as exact as their clocks agree.
    """
    from slimebus import trace as timeline

    spans = timeline.read(run_dirs)
    try:
        if out is not None:
            timeline.write_chrome(spans, out)
        if plot is not None:
            from slimebus.trace_chart import draw_trace

            draw_trace(spans, plot, begin_s=begin_s, end_s=end_s)
    except OSError as bad:
        raise UsageError(f"cannot write {bad.filename}: {bad.strerror}") from None
    except ModuleNotFoundError as absent:
        raise UsageError(f"--plot needs {absent.name}: pip install 'slimebus[plot]'") from None
    found = timeline.overlap(spans)
    click.echo(json.dumps(found, indent=2) if as_json else "\n".join(lines(found)))


def lines(found: dict[str, Any]) -> list[str]:
    """The numbers of `slimebus.trace.overlap` for a person."""
    rows = [
        ("training step, a pull in flight", _spread(found["train_s"]["with_pull"])),
        ("training step, none in flight", _spread(found["train_s"]["without"])),
        ("its CPU time, a pull in flight", _spread(found["train_cpu_s"]["with_pull"])),
        ("its CPU time, none in flight", _spread(found["train_cpu_s"]["without"])),
        ("its blocked time, a pull in flight", _spread(found["train_blocked_s"]["with_pull"])),
        ("its blocked time, none in flight", _spread(found["train_blocked_s"]["without"])),
        ("step waits for publishing", f"{_spread(found['publish_s'])}; {found['publish_share']:.1%} of the time"),
        ("encoding beside it", _spread(found["encode_s"])),
        ("pull", _spread(found["pull_s"])),
        ("load into the engine", _spread(found["load_s"])),
        ("trainer trains", f"{found['training_share']:.0%} of the time"),
        ("workers sample", f"{found['sampling_share']:.0%} of the time; both at once {found['both_share']:.0%}"),
        ("pulls beside training", f"{found['pulls_beside_training']:.0%} of them; {found['pulled_while_training']:.0%} of their time"),
    ]
    return [f"{name:<37}{text}" for name, text in [("from the second step on", f"{found['steps']} steps, {found['seconds']:.1f} s"), *rows]]


def _spread(numbers: list[float]) -> str:
    if not numbers[0]:
        return "none"
    count, low, middle, high = numbers
    return f"{_time(middle)} (quartiles {_time(low)} to {_time(high)}, {count:.0f} of them)"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
