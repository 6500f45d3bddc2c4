"""A comparison: in a terminal, as one HTML file that can be mailed, and as its data."""

import base64
import html
import importlib.util
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from string import Template

import click
import msgspec

from slimebus.bus.errors import UsageError
from slimebus.sweep import plots
from slimebus.sweep.results import ETA, RunResult, conclusion, estimate, group_by_condition, number, score_of, short, speed_of
from slimebus.telemetry.formatting import align_columns, format_duration

HEADER = ("seeds", "last score", "steps", "time", "samples/s", "mean lag", "ESS", "ESS of samples", "m2", "")
NOTE = (
    "Last score: mean over seeds with its 95% interval (Student's t); of one seed the interval, in brackets, is of the evaluation's "
    "problems alone and says nothing of other seeds. Tests: Welch, one-sided, not corrected for their number. ESS: effective sample size "
    "of tokens, or of whole samples, by their number, and m2: mean of the squared log ratio of the policy trained and the sampler, "
    "unclipped, means over steps. Time is of the steps, without the start."
)


def check_installed() -> None:
    """Raises UsageError without the packages of plots and statistics: better before a sweep than after it."""
    if missing := [name for name in ("matplotlib", "scipy") if importlib.util.find_spec(name) is None]:
        raise UsageError(f"{' and '.join(missing)} not installed: pip install 'slimebus[plot]'")


def sections_of(results: Sequence[RunResult], axis: str) -> dict[str, list[RunResult]]:
    """Runs that differ in the axis alone, by what they have in common; the title is empty where that is everything."""
    found: dict[str, list[RunResult]] = {}
    for result in results:
        rest = ", ".join(
            label if number(label) is None else f"{short(name)} {label}" for name, label in result.condition.items() if name != axis
        )
        found.setdefault(rest, []).append(result)
    return found


def main_axis(results: Sequence[RunResult], wanted: str = "") -> str:
    """The axis that is asked about: the one wanted, max_staleness, or the last."""
    axes = list(results[0].condition) if results else []
    return wanted if wanted in axes else ETA if ETA in axes else axes[-1] if axes else ""


def result_rows(results: Sequence[RunResult], axis: str) -> list[tuple[str, ...]]:
    """A row for each condition: its value of the axis, and the columns of HEADER."""
    return [(of[0].condition.get(axis, "all"), *_cells(of)) for of in group_by_condition(results).values()]


def _cells(of: Sequence[RunResult]) -> list[str]:
    ran = [run for run in of if run.counts]
    troubles = "; ".join(f"seed {run.seed} {run.state}" + (f": {run.reason}" if run.reason else "") for run in of if run.state != "done")
    if not ran:
        return [f"0 of {len(of)}", *[""] * (len(HEADER) - 2), troubles]
    again = sum(run.starts > 1 for run in ran)
    notes = "; ".join(filter(None, [troubles, f"{again} resumed" if again else ""]))
    score, last = score_of(ran).text(), ran[0].points[-1]
    score += f" [{last.low:.3f}–{last.high:.3f}]" if len(ran) == 1 and last.low < last.high else ""
    speed, lag = speed_of(ran).text(0), estimate([run.lag_mean for run in ran]).mean
    found = [[run.means[name] for run in ran if name in run.means] for name in ("ess_token", "ess_sequence", "m2")]
    means = [f"{estimate(values).mean:.3g}" if values else "" for values in found]
    steps, seconds = max(run.steps for run in ran), estimate([run.seconds for run in ran]).mean
    num_seeds = [len({run.seed for run in runs}) for runs in (ran, of)]
    return ["{} of {}".format(*num_seeds), score, str(steps), format_duration(seconds), speed, f"{lag:.2f}", *means, notes]


def render_page(results: Sequence[RunResult], axis: str, title: str, about: str) -> str:
    """The report: one HTML file without anything outside of it. about: what was run, as text."""
    sections = sections_of(results, axis)
    ran = {name: [run for run in runs if run.points] for name, runs in sections.items()}
    body = [
        f"<p class=say>{html.escape(f'{name}: ' if name else '')}{html.escape(conclusion(runs, axis))}</p>"
        for name, runs in sections.items()
        if axis
    ]
    body += [_image(plots.plot_trade_off({name: runs for name, runs in ran.items() if any(r.counts for r in runs)}, axis))] if axis else []
    for name, runs in sections.items():
        body += [f"<h2>{html.escape(name)}</h2>" if name else "", _table([(short(axis), *HEADER), *result_rows(runs, axis)])]
        body += [_image(plot(ran[name], axis)) for plot in (plots.plot_learning, plots.plot_by_lag) if ran[name]]
    every = [(run.name, run.state, run.reason, ", ".join(f"{p.steps}: {p.score:.3f}" for p in run.points)) for run in results]
    body += ["<h2>Runs</h2>", _table([("run", "state", "reason", "step: score"), *every])]
    template = Template((files("slimebus.sweep") / "report.html").read_text())
    return template.substitute(title=html.escape(title), body="\n".join(body), note=html.escape(NOTE), about=html.escape(about))


def _table(rows: Sequence[Sequence[str]]) -> str:
    made = ["".join(f"<t{'d' if i else 'h'}>{html.escape(cell)}</t{'d' if i else 'h'}>" for cell in row) for i, row in enumerate(rows)]
    return f"<div class=wide><table><tr>{'</tr><tr>'.join(made)}</tr></table></div>"


def _image(svg: str) -> str:
    return f'<div class=wide><img src="data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"></div>' if svg else ""


def show_comparison(results: Sequence[RunResult], wanted: str, out: Path | None, *, title: str, about: str) -> None:
    """Print sentences and tables; with `out` also write report.html, for people, and results.json, for programs, there."""
    axis = main_axis(results, wanted)
    if wanted and wanted != axis:
        click.echo(f"--axis {wanted}: no two of these runs differ in it alone; compared by {axis or 'nothing'}", err=True)
    for name, runs in sections_of(results, axis).items():
        lines = align_columns(result_rows(runs, axis), (short(axis), *HEADER))
        click.echo("\n".join(filter(None, [f"\n{name}" if name else "", *lines, conclusion(runs, axis) if axis else ""])))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "report.html").write_text(render_page(results, axis, title, about))
        (out / "results.json").write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
        click.echo(f"report   {out / 'report.html'}")
