"""The plots of a comparison, each as SVG text. Needs matplotlib."""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from operator import ge
from statistics import fmean
from typing import TYPE_CHECKING, Any

from slimebus.sweep.results import BUCKETS, RunResult, by_condition, number
from slimebus.sweep.statistics import Estimate, score_of, short, speed_of

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
LABEL_PLACES = ((1, 1), (1, -1), (-1, 1), (-1, -1), (0, 1), (0, -1), (1, 0), (-1, 0))
"""Sides of a point where its label may be, as steps to the right and up."""
LINE: Any = {"marker": "o", "markersize": 3, "linewidth": 1.3, "alpha": 0.85}


def learning(runs: Sequence[RunResult], axis: str) -> str:
    """Evaluation against wall time, steps and samples: a line a run, a colour a condition."""
    across = {"seconds": "seconds of steps", "steps": "steps", "samples": "samples trained"}

    def draw(axes: "Sequence[Axes]") -> None:
        for one, (name, words) in zip(axes, across.items(), strict=True):
            for i, (label, of) in enumerate(_lines(runs, axis).items()):
                for run in of:
                    points = [(getattr(point, name), point.score) for point in run.points]
                    one.plot(*zip(*points, strict=True), label=label if run is of[0] else None, **LINE, **_look(i))
            one.set_xlabel(words, loc="left")
        axes[0].set_ylabel(runs[0].score_name if runs else "")

    return _figure(3, draw)


def by_lag(runs: Sequence[RunResult], axis: str) -> str:
    """Loss, ratio and mismatch by lag: means over steps and runs."""
    shown = {name: how for name, how in BY_LAG.items() if any(name in found for run in runs for found in run.by_lag.values())}

    def draw(axes: "Sequence[Axes]") -> None:
        for one, (name, (scale, words)) in zip(axes, shown.items(), strict=True):
            for i, (label, of) in enumerate(_lines(runs, axis).items()):
                values = [[run.by_lag[b][name] for run in of if name in run.by_lag.get(b, {})] for b in BUCKETS]
                points = [(at, fmean(found)) for at, found in enumerate(values) if found]
                if points:
                    one.plot(*zip(*points, strict=True), label=label, **LINE, **_look(i))
            one.set_xticks(range(len(BUCKETS)), BUCKETS)
            is_positive = any(run.by_lag[b].get(name, 0.0) > 0 for run in runs for b in run.by_lag)
            one.set_yscale("log" if scale == "log" and is_positive else "linear")
            one.set_title(words, fontsize=9, loc="left", color=GREY)
            one.set_xlabel("lag, versions", loc="left")

    return _figure(len(shown), draw) if shown else ""


def trade_off(sections: Sections, axis: str) -> str:
    """Throughput against the axis, and score against throughput with the Pareto front: a colour a section, 95% intervals over seeds."""
    points: list[tuple[tuple[float, float], str, str]] = []

    def draw(axes: "Sequence[Axes]") -> None:
        front: list[tuple[float, float]] = []
        for i, (title, runs) in enumerate(sections.items()):
            of = {label: [run for run in found if run.counts] for label, found in _lines(runs, axis).items()}
            speed = {label: speed_of(found) for label, found in of.items() if found}
            score = {label: score_of(of[label]) for label in speed}
            at: Any = [number(label) for label in speed]
            is_scale = all(value is not None and math.isfinite(value) for value in at)
            look = _look(i) if is_scale else _look(i) | {"linestyle": ""}
            places = at if is_scale else [label.replace(", ", "\n") for label in speed]
            axes[0].errorbar(places, *_bars(list(speed.values())), marker="o", label=title or None, **look)
            axes[0].tick_params(axis="x", **{} if is_scale else {"labelrotation": 60, "labelsize": 7})
            if is_scale:
                axes[0].set_xscale("symlog", base=2, linthresh=1)
                axes[0].set_xticks(at, list(speed))
            (x, x_bars), (y, y_bars) = (_bars(list(found.values())) for found in (speed, score))
            axes[1].errorbar(x, y, y_bars, x_bars, marker="o", linestyle="", color=_look(i)["color"])
            points.extend((place, label, _look(i)["color"]) for place, label in zip(zip(x, y, strict=True), speed, strict=True))
            front += zip(x, y, strict=True)
        best = [here for here in sorted(front) if not any(other != here and all(map(ge, other, here)) for other in front)]
        axes[1].plot(*zip(*best, strict=True), color=GREY, linewidth=1, zorder=0) if best else None
        axes[0].set_xlabel(short(axis), loc="left")
        axes[0].set_ylabel("samples/s, once warm")
        axes[1].set_xlabel("samples/s, once warm", loc="left")
        axes[1].set_ylabel("last score")
        points.sort(key=lambda point: point[0] not in best)

    return _figure(2, draw, lambda axes: _label(axes[1], points))


def _label(axes: "Axes", points: Sequence[tuple[tuple[float, float], str, str]]) -> None:
    """Write to each point (place, label, colour) its label, where it covers no other and reads as no other's, or none."""
    from matplotlib.transforms import Bbox

    taken: list[Bbox] = []
    around = [Bbox.from_bounds(x - 8, y - 8, 16, 16) for x, y in axes.transData.transform([place for place, *_ in points] or [(0, 0)])]
    for i, (place, label, colour) in enumerate(points):
        others = [*taken, *around[:i], *around[i + 1 :]]
        for right, up in LABEL_PLACES:
            side: Any = {"ha": ("right", "center", "left")[right + 1], "va": ("top", "center", "bottom")[up + 1]}
            text = axes.annotate(label, place, (5 * right, 4 * up), textcoords="offset points", fontsize=7, color=colour, **side)
            text.set_in_layout(False)
            box = text.get_window_extent()
            if not any(box.overlaps(other) for other in others) and axes.bbox.fully_containsx(box.x0) and axes.bbox.fully_containsx(box.x1):
                taken.append(box)
                break
            text.remove()


def _bars(estimates: Sequence[Estimate]) -> tuple[list[float], list[list[float]]]:
    """The means, and how far the intervals go below and above them."""
    intervals = [e.interval or (e.mean, e.mean) for e in estimates]
    below, above = ([abs(end[side] - e.mean) for e, end in zip(estimates, intervals, strict=True)] for side in (0, 1))
    return [e.mean for e in estimates], [below, above]


def _lines(runs: Sequence[RunResult], axis: str) -> dict[str, list[RunResult]]:
    return {of[0].condition.get(axis, "all"): of for of in by_condition(run for run in runs if run.points).values()}


def _look(i: int) -> dict[str, Any]:
    return {"color": f"C{i % 10}", "linestyle": DASHES[i // 10 % len(DASHES)]}


def _figure(count: int, draw: "Callable[[Sequence[Axes]], None]", label: "Callable[[Sequence[Axes]], None]" = lambda axes: None) -> str:
    """SVG of `count` axes in a row, with one legend below. label: called when all has its place."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE | {"svg.hashsalt": "slimebus", "svg.fonttype": "none"}):
        figure = Figure(figsize=(3.6 * max(2, count), 3.4), layout="constrained")
        axes = figure.subplots(1, count, squeeze=False)[0]
        draw(axes)
        for one in axes:
            one.grid(color=RULE, linewidth=0.6)
            one.spines[["top", "right"]].set_visible(False)
        handles, labels = axes[0].get_legend_handles_labels()
        if handles:
            figure.legend(handles, labels, loc="outside lower left", ncols=8, frameon=False, fontsize=8)
        figure.draw_without_rendering()
        label(axes)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
        return out.getvalue()
