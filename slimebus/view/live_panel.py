"""One screen of a run while it goes on, and one line of it where there is no terminal."""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slimebus.cli.formatting import count, duration

if TYPE_CHECKING:
    from rich.console import RenderableType

BARS = "▁▂▃▄▅▆▇█"
SPARKLINE_STEPS = 40
RATE_EVERY_S = 3.0


class LivePanel:
    """Shows the broker's status; remembers rewards, accuracies and token counts between looks.

    title: what runs, such as "RL" or "warm-up". is_supervised: its signal is the loss. Its accuracy is the mean reward of the dataset
    `heldout`, or of the first.
    """

    def __init__(self, title: str, *, is_supervised: bool = False) -> None:
        self.title = title
        self.signal = "loss" if is_supervised else "reward"
        self.status: dict[str, Any] = {}
        self.signals: dict[int, float] = {}
        """Step -> its mean reward, or its loss in a run of SFT."""
        self.accuracies: dict[int, float] = {}
        """Version -> mean reward of the dataset."""
        self._counted_at, self._tokens = time.monotonic(), 0.0
        self._tokens_per_s: float | None = None

    def take(self, status: dict[str, Any]) -> None:
        """From now on show this status (docs/protocol.md)."""
        self.status = status
        self.signals |= {row["step"]: row["metrics"].get(self.signal, 0.0) for row in status["steps"]}
        dataset = main_dataset(row["dataset"] for row in status["evaluations"])
        for row in status["evaluations"]:
            if row["dataset"] == dataset and row["done"] and row["mean_reward"] is not None:
                self.accuracies[row["version"]] = row["mean_reward"]
        now, tokens = time.monotonic(), sum(worker["metrics"].get("tokens", 0.0) for worker in self._workers())
        if now - self._counted_at > RATE_EVERY_S and tokens >= self._tokens:
            self._tokens_per_s = (tokens - self._tokens) / (now - self._counted_at)
            self._counted_at, self._tokens = now, tokens

    def render(self) -> "RenderableType":
        """The screen, nine lines high whatever the status, for `rich.live.Live`."""
        from rich.console import RenderableType
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        texts = self.texts()
        progress = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=max(1, self.status["num_steps"]), completed=self.status["step"], width=SPARKLINE_STEPS)
        progress.add_row(bar, Text(texts["step"]))
        signals = Text.assemble((sparkline(self._in_order(self.signals)), "dark_orange"), f"  {texts[self.signal]}")
        drawn: dict[str, RenderableType] = {"step": progress, self.signal: signals}
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True, min_width=max(map(len, texts)))
        grid.add_column(no_wrap=True, overflow="ellipsis")
        for label, text in texts.items():
            grid.add_row(label, drawn.get(label, Text(text)))
        return Panel(grid, title=f"[bold]{self.title}[/]", title_align="left", border_style="dim", padding=(0, 1))

    def line(self) -> str:
        """The same in one plain line, to be printed every few seconds."""
        texts = self.texts()
        shown = [f"{label} {texts[label]}" for label in ("step", self.signal, "held-out", "lag", "tokens/s")]
        return " | ".join([f"{self.title} {shown[0]}", *shown[1:], *self.status["waiting"][:1]])

    def texts(self) -> dict[str, str]:
        """What is shown, by its label. Lags are in versions, over the trained tokens of the last step."""
        status, workers, groups = self.status, self._workers(), self.status["groups"]
        last = status["steps"][-1]["metrics"] if status["steps"] else {}
        signals, accuracies = self._in_order(self.signals), [f"{value:.3f}" for value in self._in_order(self.accuracies)]
        trainer_tokens_per_s = last.get("num_tokens", 0.0) / max(1e-9, last.get("train_s", 0.0) + last.get("wait_s", 0.0))
        plural = "worker" if len(workers) == 1 else "workers"
        time_s = time_left(last.get("elapsed_s", 0.0), status["num_steps"] - status["step"], status["pace"]["step_s"])
        return {
            "step": f"{status['step']}/{status['num_steps']}  {time_s}",
            self.signal: f"{signals[-1]:.3f}" if signals else "none yet",
            "held-out": f"{accuracies[-1]} ({accuracies[0]} before)" if accuracies else "not measured",
            "lag": f"mean {last.get('lag_mean', 0.0):.2f}, largest {last.get('lag_max', 0.0):g}, bound {_bound(status)}",
            "tokens/s": f"trainer {count(trainer_tokens_per_s)}, {len(workers)} {plural} {count(self._workers_tokens_per_s())}",
            "groups": ", ".join(f"{groups[phase]} {phase}" for phase in ("queued", "leased", "ready", "assigned")),
            "waiting": "; ".join(status["waiting"]) or "nobody",
        }

    def _workers_tokens_per_s(self) -> float:
        """Between the last two looks; before there are two, over the life of each worker."""
        if self._tokens_per_s is not None:
            return self._tokens_per_s
        return sum(tokens_per_s(worker["metrics"]) for worker in self._workers())

    def _workers(self) -> list[dict[str, Any]]:
        return [c for c in self.status["clients"] if c["role"] == "rollout" and c["state"] not in ("gone", "fenced")]

    @staticmethod
    def _in_order(values: dict[int, float]) -> list[float]:
        return [values[key] for key in sorted(values)]


def sparkline(values: Sequence[float], width: int = SPARKLINE_STEPS) -> str:
    """The last `width` values as bars between the least and the largest of them; equal ones are all of middle height."""
    shown = values[-width:]
    low, high = min(shown, default=0.0), max(shown, default=0.0)
    if high == low:
        return BARS[len(BARS) // 2 - 1] * len(shown)
    return "".join(BARS[min(len(BARS) - 1, int((v - low) / (high - low) * len(BARS)))] for v in shown)


def time_left(elapsed_s: float, steps_left: int, step_s: float) -> str:
    """Time that the trainer took, and the time that the remaining steps take at `step_s` each; 0: not known yet."""
    if steps_left <= 0 or not step_s:
        return duration(elapsed_s)
    return f"{duration(elapsed_s)}, {duration(steps_left * step_s)} left"


def main_dataset(names: Iterable[str]) -> str:
    """Whose mean reward stands for the run: `heldout`, else the first; empty without any."""
    found = list(names)
    return "heldout" if "heldout" in found else next(iter(found), "")


def tokens_per_s(metrics: Mapping[str, float]) -> float:
    """Of a worker, over the time that it served."""
    return metrics.get("tokens", 0.0) / max(1.0, metrics.get("serving_s", 0.0))


def _bound(status: dict[str, Any]) -> str:
    bound = status["settings"]["max_staleness"]
    return bound if isinstance(bound, str) else f"{bound:g}"
