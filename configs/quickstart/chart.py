"""The picture of a run: accuracy, reward and lag over time, as one PNG."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimebus.bus.errors import SlimebusError
from slimebus.sweep.plots import GREY, INK, RULE, STYLE
from slimebus.telemetry.formatting import format_duration
from slimebus.view.report import Rows, RunReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ACCURACY, REWARD, LAG = "#0b6e8a", "#d9822b", "#8796a5"
MARGIN_LEFT, MARGIN_RIGHT = 0.06, 0.825
REWARD_WINDOW = 9
"""Steps that the drawn reward is averaged over; each step's own is drawn faintly behind it."""


def draw_curve(report: RunReport, path: Path, *, dataset: str, max_staleness: float, rl_s: float, machine: str = "") -> None:
    """Write the picture of a run to `path` (PNG, 1650 x 990 pixels), making its folder. Needs matplotlib.

    dataset: its mean reward is the accuracy. rl_s: how long it all took, and machine: where it ran, for the title.
    Raises SlimebusError when there is no step or no evaluation to draw.
    """
    steps, evals = report.steps, report.evaluations(dataset)
    if not steps or not evals:
        raise SlimebusError(f"nothing to draw: {len(steps)} steps and {len(evals)} evaluations; at least one of each")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    start = steps[0]["time"] - steps[0]["elapsed_s"]
    times, eval_times = ([max(0.0, row["time"] - start) for row in rows] for rows in (steps, evals))
    with rc_context(STYLE):
        figure = Figure(figsize=(10, 6), dpi=165, facecolor="white")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[5, 1])
        figure.subplots_adjust(left=MARGIN_LEFT, right=MARGIN_RIGHT, top=0.81, bottom=0.085, hspace=0.14)
        above.set_xlim(0, max(times[-1], eval_times[-1]) or 1.0)
        _draw_learning(above, times, [row["reward"] for row in steps], eval_times, evals)
        _draw_lag(below, times, steps, max_staleness)
        _draw_steps_axis(above, dict(zip((row["step"] + 1 for row in steps), times, strict=True)))
        figure.text(MARGIN_LEFT, 0.935, title(evals, rl_s, machine), fontsize=15.5, weight="bold", va="center")
        problems = f"{evals[-1]['num_samples']} held-out problems; " if evals[-1].get("num_samples") else ""
        note = f"{problems}band: 95% interval; {len(steps)} steps, reward averaged over {REWARD_WINDOW} of them"
        figure.text(MARGIN_LEFT, 0.892, note, fontsize=9.5, color=GREY, va="center")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def title(evals: Rows, rl_s: float, machine: str = "") -> str:
    """The result in one line: `0.43 → 0.95 held-out accuracy in 80 s of RL on 2 CPU cores`."""
    first, last = evals[0]["mean_reward"], evals[-1]["mean_reward"]
    return f"{first:.2f} → {last:.2f} held-out accuracy in {format_duration(rl_s)} of RL{f' on {machine}' if machine else ''}"


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and its neighbours, `window` in all, as many of them as there are at both ends."""
    around = [values[max(0, i - window // 2) : i + window // 2 + 1] for i in range(len(values))]
    return [sum(near) / len(near) for near in around]


def spread(one: float, two: float, gap: float, least: float) -> tuple[float, float]:
    """Two heights at least `gap` apart, moved evenly from where they are wanted, and lifted to `least`: labels that do not overlap."""
    missing = max(0.0, gap - abs(one - two)) / 2
    sign = 1 if one >= two else -1
    one, two = one + sign * missing, two - sign * missing
    lift = max(0.0, least - min(one, two))
    return one + lift, two + lift


def _draw_learning(axes: "Axes", times: list[float], rewards: list[float], eval_times: list[float], evals: Rows) -> None:
    smooth, accuracies = running_mean(rewards, REWARD_WINDOW), [row["mean_reward"] for row in evals]
    axes.plot(times, rewards, color=REWARD, linewidth=0.7, alpha=0.35, zorder=2)
    axes.plot(times, smooth, color=REWARD, linewidth=1.8, zorder=3)
    low, high = [row["low"] for row in evals], [row["high"] for row in evals]
    axes.fill_between(eval_times, low, high, color=ACCURACY, alpha=0.15, linewidth=0, zorder=2)
    axes.plot(eval_times, accuracies, color=ACCURACY, linewidth=2.4, marker="o", markersize=4.5, zorder=4, clip_on=False)
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "", "0.5", "", "1"])
    axes.tick_params(length=0, labelbottom=False)
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    axes.spines[["top", "left", "right"]].set_visible(False)
    accuracy_height, reward_height = spread(accuracies[-1], smooth[-1], 0.13, 0.05)
    _label(axes, accuracy_height, ACCURACY, f"accuracy {accuracies[-1]:.2f}", "held-out, greedy")
    _label(axes, reward_height, REWARD, f"reward {smooth[-1]:.2f}", "of the training samples")


def _draw_lag(axes: "Axes", times: list[float], steps: Rows, bound: float) -> None:
    edges, largest = [0.0, *times], [row["lag_max"] for row in steps]
    bounded = bound != float("inf")
    top = float(max(bound if bounded else 0, *largest, 1))
    axes.stairs(largest, edges, fill=True, color=LAG, alpha=0.35, linewidth=0)
    axes.stairs([row["lag_mean"] for row in steps], edges, fill=True, color=LAG, linewidth=0)
    if bounded:
        axes.axhline(bound, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        _label(axes, bound, INK, f"bound {bound:g}", "")
    axes.set_ylim(0, top * 1.15)
    axes.set_yticks([0.0, top], ["0", f"{top:g}"])
    axes.tick_params(length=0)
    axes.spines[["top", "left", "right"]].set_visible(False)
    _label(axes, top * 0.38, LAG, "lag", "versions: mean, largest")
    axes.set_xlabel("seconds since the trainer started", loc="left")


def _draw_steps_axis(axes: "Axes", time_of: dict[int, float]) -> None:
    """Ticks at the moments when round numbers of steps were done. time_of: number of steps -> seconds."""
    from matplotlib.ticker import MaxNLocator

    wanted = [int(value) for value in MaxNLocator(7, integer=True).tick_values(0, max(time_of)) if int(value) in time_of]
    above = axes.twiny()
    above.set_xlim(axes.get_xlim())
    above.set_xticks([time_of[step] for step in wanted], [f"step {s}" if s == wanted[0] else str(s) for s in wanted])
    above.tick_params(length=3, color=RULE, labelsize=9)
    above.spines[["left", "right", "top", "bottom"]].set_visible(False)


def _label(axes: "Axes", height: float, color: str, text: str, note: str) -> None:
    """Text right of the axes at a height of its data, a smaller note under it."""
    place: Any = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": "center", "annotation_clip": False}
    axes.annotate(text, (1, height), xytext=(10, 0), color=color, weight="bold", fontsize=10, **place)
    axes.annotate(note, (1, height), xytext=(10, -13), color=GREY, fontsize=8.5, **place)
