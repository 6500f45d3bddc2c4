"""One screen of a run while it goes on, and one line of it where there is no terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

from slimebus.words import count, duration

if TYPE_CHECKING:
    from rich.console import RenderableType

BARS = "▁▂▃▄▅▆▇█"
SPARKLINE_STEPS = 40
LABEL_WIDTH = len("accuracy")


class LiveStatus(TypedDict):
    """What the view shows. Rates in tokens per second, lags in versions over the last step's trained tokens, time in seconds.

    phase: what runs, such as "RL" or "warm-up". rewards: mean reward of each step so far, oldest first; where signal says "loss",
    the loss of each step instead.
    accuracy, accuracy_before: held-out, newest and before the first step; None before they are known.
    queued, leased, ready, assigned: groups in each state. waits: who waits for whom, a sentence each; empty when nobody does.
    """

    phase: str
    step: int
    num_steps: int
    seconds: float
    signal: str
    rewards: Sequence[float]
    accuracy: float | None
    accuracy_before: float | None
    lag_mean: float
    lag_max: float
    max_staleness: float
    trainer_tokens_per_s: float
    workers_tokens_per_s: float
    workers: int
    queued: int
    leased: int
    ready: int
    assigned: int
    waits: Sequence[str]


def render(status: LiveStatus) -> "RenderableType":
    """The screen, eight lines high whatever the status, for `rich.live.Live`."""
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    progress = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=max(1, status["num_steps"]), completed=status["step"], width=SPARKLINE_STEPS)
    progress.add_row(bar, Text(f"{status['step']}/{status['num_steps']}  {time_left(status)}"))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True, min_width=LABEL_WIDTH)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    grid.add_row("step", progress)
    grid.add_row(status["signal"], Text.assemble((sparkline(status["rewards"]), "dark_orange"), f"  {last_reward(status)}"))
    grid.add_row("accuracy", Text(accuracy(status), style="bold cyan"))
    over = status["lag_max"] > status["max_staleness"]
    grid.add_row("lag", Text(lag(status), style="bold red" if over else ""))
    grid.add_row("tokens/s", speed(status))
    grid.add_row("groups", groups(status))
    grid.add_row("waiting", Text("; ".join(status["waits"]) or "nobody", style="" if status["waits"] else "dim"))
    return Panel(grid, title=f"[bold]{status['phase']}[/]", title_align="left", border_style="dim", padding=(0, 1))


def line(status: LiveStatus) -> str:
    """The same in one plain line, to be printed every few seconds."""
    parts = [
        f"{status['phase']} step {status['step']}/{status['num_steps']}",
        f"{status['signal']} {last_reward(status)}",
        f"accuracy {accuracy(status)}",
        f"lag {lag(status)}",
        f"tokens/s {speed(status)}",
        *status["waits"][:1],
    ]
    return " | ".join(parts)


def sparkline(values: Sequence[float], width: int = SPARKLINE_STEPS) -> str:
    """The last `width` values as bars between the least and the largest of them; equal ones are all of middle height."""
    shown = values[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    if high == low:
        return BARS[len(BARS) // 2 - 1] * len(shown)
    return "".join(BARS[min(len(BARS) - 1, int((v - low) / (high - low) * len(BARS)))] for v in shown)


def time_left(status: LiveStatus) -> str:
    """Time taken, and the time that the remaining steps take at the mean pace so far."""
    taken = duration(status["seconds"])
    if status["step"] == 0 or status["step"] >= status["num_steps"]:
        return taken
    rest = status["seconds"] / status["step"] * (status["num_steps"] - status["step"])
    return f"{taken}, {duration(rest)} left"


def last_reward(status: LiveStatus) -> str:
    """The newest reward or loss; `none yet` before the first step."""
    return f"{status['rewards'][-1]:.3f}" if status["rewards"] else "none yet"


def accuracy(status: LiveStatus) -> str:
    """`0.912 (0.430 before)`; says so where an evaluation has not ended yet."""
    if status["accuracy"] is None:
        return "not measured yet"
    if status["accuracy_before"] is None:
        return f"{status['accuracy']:.3f}"
    return f"{status['accuracy']:.3f} ({status['accuracy_before']:.3f} before)"


def lag(status: LiveStatus) -> str:
    """Mean and largest lag of the last step, and the bound."""
    return f"mean {status['lag_mean']:.2f}, largest {status['lag_max']:g}, bound {status['max_staleness']:g}"


def speed(status: LiveStatus) -> str:
    """Tokens a second of the trainer and of all workers together."""
    plural = "worker" if status["workers"] == 1 else "workers"
    return f"trainer {count(status['trainer_tokens_per_s'])}, {status['workers']} {plural} {count(status['workers_tokens_per_s'])}"


def groups(status: LiveStatus) -> str:
    """How many groups are in each state."""
    return f"{status['queued']} queued, {status['leased']} leased, {status['ready']} ready, {status['assigned']} assigned"
