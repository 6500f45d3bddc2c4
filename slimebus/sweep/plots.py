"""The plots of a comparison, each as SVG text. Needs matplotlib."""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from operator import ge
from statistics import fmean
from typing import TYPE_CHECKING, Any

from slimebus.sweep.results import BUCKETS, Estimate, RunResult, group_by_condition, number, score_of, short, speed_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Sections = Mapping[str, Sequence[RunResult]]
"""Title -> runs that differ in the axis alone."""
INK, GREY, RULE = "#1f2933", "#6b7785", "#dde2e7"
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": RULE,
    "axes.linewidth": 0.8,
    "axes.labelcolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
}
BY_LAG = {
    "loss": ("loss", "loss, by the step's mean lag"),
    "log_ratio_p95": ("linear", "abs(log ratio), 95% quantile"),
    "m2": ("log", "second moment of the log ratio"),
    "ess_token": ("linear", "effective sample size of tokens"),
    "mismatch": ("log", "engine's own mismatch, mean"),
}
DASHES = ("-", "--", ":", "-.")
MARKERS = "osD^vPX*<>"
LEGEND_CHARS = 110
"""That stand beside each other in a legend, each entry with 4 more for its symbol."""
LEGEND_LINE = 0.2
"""Inches."""
LINE: Any = {"marker": "o", "markersize": 3, "linewidth": 1.3, "alpha": 0.85}


def plot_learning(runs: Sequence[RunResult], axis: str) -> str:
    """Evaluation against wall time, steps and samples: a line a run, a colour a condition."""
    across = {"seconds": "seconds of steps", "steps": "steps", "samples": "samples trained"}

    def draw(axes: "Sequence[Axes]") -> None:
        for one, (name, words) in zip(axes, across.items(), strict=True):
            for i, (label, of) in enumerate(_lines(runs, axis).items()):
                for run in of:
                    points = [(getattr(point, name), point.score) for point in run.points]
                    one.plot(*zip(*points, strict=True), label=label if run is of[0] else None, **LINE, **_line_style(i))
            one.set_xlabel(words, loc="left")
        axes[0].set_ylabel(runs[0].score_name if runs else "")

    return _figure(3, draw)


def plot_by_lag(runs: Sequence[RunResult], axis: str) -> str:
    """Loss, ratio and mismatch by lag: means over steps and runs."""
    shown = {name: how for name, how in BY_LAG.items() if any(name in found for run in runs for found in run.by_lag.values())}

    def draw(axes: "Sequence[Axes]") -> None:
        for one, (name, (scale, words)) in zip(axes, shown.items(), strict=True):
            for i, (label, of) in enumerate(_lines(runs, axis).items()):
                values = [[run.by_lag[b][name] for run in of if name in run.by_lag.get(b, {})] for b in BUCKETS]
                points = [(at, fmean(found)) for at, found in enumerate(values) if found]
                if points:
                    one.plot(*zip(*points, strict=True), label=label, **LINE, **_line_style(i))
            one.set_xticks(range(len(BUCKETS)), BUCKETS)
            is_positive = any(run.by_lag[b].get(name, 0.0) > 0 for run in runs for b in run.by_lag)
            one.set_yscale("log" if scale == "log" and is_positive else "linear")
            one.set_title(words, fontsize=9, loc="left", color=GREY)
            one.set_xlabel("lag, versions", loc="left")

    return _figure(len(shown), draw) if shown else ""


def plot_trade_off(sections: Sections, axis: str) -> str:
    """Throughput against the axis, and score against throughput with the Pareto front, with 95% intervals over seeds.

    A colour a section; on the right a marker a value of the axis.
    """
    markers: dict[str, str] = {}

    def draw(axes: "Sequence[Axes]") -> None:
        front: list[tuple[float, float]] = []
        for i, (title, runs) in enumerate(sections.items()):
            of = {label: [run for run in found if run.counts] for label, found in _lines(runs, axis).items()}
            speed = {label: speed_of(found) for label, found in of.items() if found}
            at: Any = [number(label) for label in speed]
            is_scale = all(value is not None and math.isfinite(value) for value in at)
            style = _line_style(i) if is_scale else _line_style(i) | {"linestyle": ""}
            places = at if is_scale else [label.replace(", ", "\n") for label in speed]
            axes[0].errorbar(places, *_bars(list(speed.values())), marker="o", label=title or None, **style)
            axes[0].tick_params(axis="x", **{} if is_scale else {"labelrotation": 60, "labelsize": 7})
            if is_scale:
                axes[0].set_xscale("symlog", base=2, linthresh=1)
                axes[0].set_xticks(at, list(speed))
            for label, fast in speed.items():
                (x, x_bars), (y, y_bars) = _bars([fast]), _bars([score_of(of[label])])
                marker = markers.setdefault(label, MARKERS[len(markers) % len(MARKERS)])
                axes[1].errorbar(x, y, y_bars, x_bars, marker=marker, linestyle="", color=_line_style(i)["color"])
                front += zip(x, y, strict=True)
        best = [here for here in sorted(front) if not any(other != here and all(map(ge, other, here)) for other in front)]
        axes[1].plot(*zip(*best, strict=True), color=GREY, linewidth=1, zorder=0) if best else None
        for label, marker in markers.items():
            axes[1].plot([], [], marker=marker, linestyle="", color=GREY, label=f"{short(axis)} {label}")
        axes[0].set_xlabel(short(axis), loc="left")
        axes[0].set_ylabel("samples/s, once warm")
        axes[1].set_xlabel("samples/s, once warm", loc="left")
        axes[1].set_ylabel("last score")

    return _figure(2, draw)


def _bars(estimates: Sequence[Estimate]) -> tuple[list[float], list[list[float]]]:
    """The means, and how far the intervals go below and above them."""
    intervals = [e.interval or (e.mean, e.mean) for e in estimates]
    below, above = ([abs(end[side] - e.mean) for e, end in zip(estimates, intervals, strict=True)] for side in (0, 1))
    return [e.mean for e in estimates], [below, above]


def _lines(runs: Sequence[RunResult], axis: str) -> dict[str, list[RunResult]]:
    return {of[0].condition.get(axis, "all"): of for of in group_by_condition(run for run in runs if run.points).values()}


def _line_style(i: int) -> dict[str, Any]:
    return {"color": f"C{i % 10}", "linestyle": DASHES[i // 10 % len(DASHES)]}


def _figure(count: int, draw: "Callable[[Sequence[Axes]], None]") -> str:
    """SVG of `count` axes in a row, with one legend below."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE | {"svg.hashsalt": "slimebus", "svg.fonttype": "none"}):
        width, height = 3.6 * max(2, count), 3.4
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(1, count, squeeze=False)[0]
        draw(axes)
        for one in axes:
            one.grid(color=RULE, linewidth=0.6)
            one.spines[["top", "right"]].set_visible(False)
        found = {label: handle for one in axes for handle, label in zip(*one.get_legend_handles_labels(), strict=True)}
        if found:
            num_columns = max(1, LEGEND_CHARS // (4 + max(map(len, found))))
            figure.set_size_inches(width, height + LEGEND_LINE * (math.ceil(len(found) / num_columns) - 1))
            figure.legend(found.values(), found, loc="outside lower left", ncols=num_columns, frameon=False, fontsize=8)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
        return out.getvalue()
