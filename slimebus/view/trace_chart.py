"""The picture of a few seconds of a run: what the trainer and each worker did, one above the other, on one axis of time."""

import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimebus.bus.errors import DataError, UsageError
from slimebus.view.trace import LANES, SpanRow, processes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, GREY, RULE = "#1f2933", "#6b7785", "#dde2e7"
ACCURACY, REWARD, LAG = "#0b6e8a", "#d9822b", "#8796a5"
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
BARS = {
    "train": (ACCURACY, "train"),
    "wait": (RULE, "wait for a batch"),
    "publish": ("#c0392b", "copy out (the step waits)"),
    "save": ("#b59f3b", "checkpoint"),
    "commit": (INK, "commit"),
    "encode": ("#7a4f9a", "encode"),
    "announce": ("#b39bc8", "announce"),
    "pull": (REWARD, "pull"),
    "share": ("#3c8d5a", ""),
    "load": ("#3c8d5a", "load into the engine"),
    "sample": (LAG, "groups being sampled"),
}
"""Colour and words of each span's name; those of one lane and colour share the words."""
SHOWN_STEPS = 4


def draw_trace(spans: Sequence[SpanRow], path: Path, *, begin_s: float | None = None, end_s: float | None = None) -> None:
    """Write the picture to `path` (PNG), making its folder; times in seconds since the first span. Needs matplotlib.

    Without a begin or an end it shows four usual steps from the middle of the run. Raises DataError when nothing lies between them,
    UsageError for a `path` that does not end in .png.
    """
    if path.suffix != ".png":
        raise UsageError(f"--plot {path}: the picture is a PNG; give a name that ends in .png")
    start = spans[0].begin
    begin, end = window(spans, begin_s, end_s)
    shown = [span for span in spans if span.begin - start < end and span.end - start > begin]
    rows = [(process, name) for process in processes(shown) for name in _rows_of(shown, process)]
    if not rows:
        raise DataError(f"nothing to draw between {begin:.1f} and {end:.1f} s; the run has {spans[-1].end - start:.1f} s")
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    with rc_context(STYLE):
        figure = Figure(figsize=(11, 1.3 + 0.55 * len(rows)), dpi=150, facecolor="white")
        axes = figure.subplots()
        for height, (process, row) in enumerate(reversed(rows)):
            own = [span for span in shown if span.process == process]
            _draw_groups(axes, own, start, height) if row == "groups" else _draw_bars(axes, own, row, start, height)
        axes.set_xlim(begin, end)
        axes.set_ylim(-0.6, len(rows) - 0.4)
        axes.set_yticks(range(len(rows)), [f"{process}  {row}" for process, row in reversed(rows)])
        axes.set_xlabel("seconds since the run's first recorded work", loc="left")
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        axes.grid(axis="x", color=RULE, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "left", "right"]].set_visible(False)
        seen = {span.name for span in shown if span.seconds > (end - begin) / 2000}
        handles = [Patch(color=colour, label=words) for name, (colour, words) in BARS.items() if name in seen and words]
        place: Any = {"loc": "lower left", "bbox_to_anchor": (0, 1.0), "ncols": len(handles), "borderaxespad": 0.2}
        axes.legend(handles=handles, frameon=False, fontsize=8.5, handlelength=1.0, columnspacing=1.2, **place)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, bbox_inches="tight")


def window(spans: Sequence[SpanRow], begin_s: float | None, end_s: float | None) -> tuple[float, float]:
    """The seconds to show, since the first span."""
    start, last = spans[0].begin, max(span.end for span in spans) - spans[0].begin
    steps = [span.begin - start for span in spans if span.name == "train" and span.process == "trainer"]
    middle = steps[len(steps) // 2] if steps else 0.0
    pace = statistics.median(b - a for a, b in pairwise(steps)) if len(steps) > 1 else last
    begin = middle - 0.1 * pace if begin_s is None else begin_s
    return max(0.0, begin), min(last, begin + (SHOWN_STEPS + 0.2) * pace) if end_s is None else end_s


def _rows_of(shown: Sequence[SpanRow], process: str) -> list[str]:
    names = {span.name for span in shown if span.process == process}
    return [row for row, of in LANES.items() if names & set(of)]


def _draw_bars(axes: "Axes", spans: Sequence[SpanRow], row: str, start: float, height: int) -> None:
    for name in LANES[row]:
        bars = [(span.begin - start, span.seconds) for span in spans if span.name == name]
        axes.broken_barh(bars, (height - 0.3, 0.6), facecolor=BARS[name][0], linewidth=0)


def _draw_groups(axes: "Axes", spans: Sequence[SpanRow], start: float, height: int) -> None:
    """How many groups were being sampled, as a curve whose top is the row's."""
    changes = sorted((at - start, by) for s in spans if s.name == "sample" for at, by in ((s.begin, 1), (s.end, -1)))
    counts, edges, now = [], [changes[0][0]], 0
    for (_, by), (until, _) in pairwise(changes):
        now += by
        counts.append(now)
        edges.append(until)
    top = max(counts)
    axes.stairs([height - 0.3 + 0.6 * n / top for n in counts], edges, baseline=height - 0.3, fill=True, color=LAG, linewidth=0)
    beside(axes, height, f"up to {top}", (6, 0), fontsize=8.5, color=GREY)


def beside(axes: "Axes", height: float, text: str, shift: tuple[float, float], **style: Any) -> None:
    """Text right of the axes at a height of its data, moved by `shift` points."""
    place: Any = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": "center", "annotation_clip": False}
    axes.annotate(text, (1, height), xytext=shift, **place, **style)
