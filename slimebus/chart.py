"""The picture of a run: accuracy, reward and lag over time, as one PNG."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from slimebus.errors import SlimebusError
from slimebus.words import duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GREY, RULE = "#1f2933", "#6b7785", "#dde2e7"
ACCURACY, REWARD, LAG = "#0b6e8a", "#d9822b", "#8796a5"
MARGIN_LEFT, MARGIN_RIGHT = 0.06, 0.825
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
REWARD_WINDOW = 9
"""Steps that the drawn reward is averaged over; each step's own is drawn faintly behind it."""


class StepPoint(TypedDict):
    """One trained step. t: seconds since the start of the run; lags in versions, over the step's trained tokens."""

    t: float
    step: int
    reward: float
    lag_mean: float
    lag_max: float


class EvalPoint(TypedDict):
    """One evaluation of the weights after `step` steps; accuracy and its interval in 0..1."""

    t: float
    step: int
    accuracy: float
    low: float
    high: float


class Curve(TypedDict):
    """What is drawn. machine: where it ran, for the title ("2 CPU cores"); evaluation: what accuracy was measured on.

    rl_s: how long it all took, for the title too; without it, until the last evaluation.
    """

    steps: Sequence[StepPoint]
    evals: Sequence[EvalPoint]
    max_staleness: float
    machine: NotRequired[str]
    rl_s: NotRequired[float]
    evaluation: NotRequired[str]


def draw_curve(points: Curve, path: Path) -> None:
    """Write the picture to `path` (PNG, 1650 x 990 pixels), making its folder. Needs matplotlib.

    Raises SlimebusError when there is no step or no evaluation to draw.
    """
    if not points["steps"] or not points["evals"]:
        raise SlimebusError(f"nothing to draw: {len(points['steps'])} steps and {len(points['evals'])} evaluations; at least one of each")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(10, 6), dpi=165, facecolor="white")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[5, 1])
        figure.subplots_adjust(left=MARGIN_LEFT, right=MARGIN_RIGHT, top=0.81, bottom=0.085, hspace=0.14)
        end = max(points["steps"][-1]["t"], points["evals"][-1]["t"])
        above.set_xlim(0, end or 1.0)
        _draw_learning(above, points)
        _draw_lag(below, points)
        _draw_steps_axis(above, points["steps"])
        _write_title(figure, points)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def title(points: Curve) -> str:
    """The result in one line: `0.43 → 0.95 held-out accuracy in 80 s of RL on 2 CPU cores`."""
    first, last = points["evals"][0], points["evals"][-1]
    where = f" on {points['machine']}" if points.get("machine") else ""
    return f"{first['accuracy']:.2f} → {last['accuracy']:.2f} held-out accuracy in {duration(points.get('rl_s', last['t']))} of RL{where}"


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and its neighbours, `window` in all, as many of them as there are at both ends."""
    around = [values[max(0, i - window // 2) : i + window // 2 + 1] for i in range(len(values))]
    return [sum(near) / len(near) for near in around]


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Two heights at least `gap` apart, moved evenly from where they are wanted: labels that do not overlap."""
    one, two = wanted
    missing = (gap - abs(one - two)) / 2
    if missing <= 0:
        return [one, two]
    sign = 1 if one >= two else -1
    return [one + sign * missing, two - sign * missing]


def _draw_learning(axes: "Axes", points: Curve) -> None:
    steps, evals = points["steps"], points["evals"]
    times, rewards = [s["t"] for s in steps], [s["reward"] for s in steps]
    smooth = running_mean(rewards, REWARD_WINDOW)
    axes.plot(times, rewards, color=REWARD, linewidth=0.7, alpha=0.35, zorder=2)
    axes.plot(times, smooth, color=REWARD, linewidth=1.8, zorder=3)
    at = [e["t"] for e in evals]
    axes.fill_between(at, [e["low"] for e in evals], [e["high"] for e in evals], color=ACCURACY, alpha=0.15, linewidth=0, zorder=2)
    axes.plot(at, [e["accuracy"] for e in evals], color=ACCURACY, linewidth=2.4, marker="o", markersize=4.5, zorder=4, clip_on=False)
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "", "0.5", "", "1"])
    axes.tick_params(length=0, labelbottom=False)
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    axes.spines[["top", "left", "right"]].set_visible(False)
    last = evals[-1]["accuracy"], smooth[-1]
    heights = spread(last, 0.13)
    _label(axes, heights[0], ACCURACY, f"accuracy {last[0]:.2f}", "held-out, greedy")
    _label(axes, heights[1], REWARD, f"reward {last[1]:.2f}", "of the training samples")


def _draw_lag(axes: "Axes", points: Curve) -> None:
    steps, bound = points["steps"], points["max_staleness"]
    edges = [0.0, *(s["t"] for s in steps)]
    bounded = bound != float("inf")
    top = max(bound if bounded else 0, *(s["lag_max"] for s in steps), 1)
    axes.stairs([s["lag_max"] for s in steps], edges, fill=True, color=LAG, alpha=0.35, linewidth=0)
    axes.stairs([s["lag_mean"] for s in steps], edges, fill=True, color=LAG, linewidth=0)
    if bounded:
        axes.axhline(bound, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        _label(axes, bound, INK, f"bound {bound:g}", "")
    axes.set_ylim(0, top * 1.15)
    axes.set_yticks(sorted({0.0, float(top)}), [f"{v:g}" for v in sorted({0.0, float(top)})])
    axes.tick_params(length=0)
    axes.spines[["top", "left", "right"]].set_visible(False)
    _label(axes, top * 0.38, LAG, "lag", "versions: mean, largest")
    axes.set_xlabel("seconds since the trainer started", loc="left")


def _draw_steps_axis(axes: "Axes", steps: Sequence[StepPoint]) -> None:
    """Ticks at the moments when round numbers of steps were done."""
    from matplotlib.ticker import MaxNLocator

    known = {s["step"]: s["t"] for s in steps}
    wanted = [int(v) for v in MaxNLocator(7, integer=True).tick_values(0, steps[-1]["step"]) if int(v) in known]
    above = axes.twiny()
    above.set_xlim(axes.get_xlim())
    above.set_xticks([known[step] for step in wanted], [f"step {s}" if i == 0 else str(s) for i, s in enumerate(wanted)])
    above.tick_params(length=3, color=RULE, labelsize=9)
    above.spines[["left", "right", "top", "bottom"]].set_visible(False)


def _label(axes: "Axes", height: float, color: str, text: str, note: str) -> None:
    """Text right of the axes at a height of its data, a smaller note under it."""
    _beside(axes, height, 0, text, color=color, weight="bold", fontsize=10)
    _beside(axes, height, -13, note, color=GREY, weight="normal", fontsize=8.5)


def _beside(axes: "Axes", height: float, shift: float, text: str, *, color: str, weight: str, fontsize: float) -> None:
    axes.annotate(
        text,
        (1, height),
        xycoords=("axes fraction", "data"),
        xytext=(10, shift),
        textcoords="offset points",
        va="center",
        annotation_clip=False,
        color=color,
        weight=weight,
        fontsize=fontsize,
    )


def _write_title(figure: "Figure", points: Curve) -> None:
    figure.text(MARGIN_LEFT, 0.935, title(points), fontsize=15.5, weight="bold", va="center")
    n = len(points["steps"])
    where = f"{points['evaluation']}; " if points.get("evaluation") else ""
    note = f"{where}band: 95% interval; {n} steps, reward averaged over {REWARD_WINDOW} of them"
    figure.text(MARGIN_LEFT, 0.892, note, fontsize=9.5, color=GREY, va="center")
