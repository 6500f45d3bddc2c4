"""One screen of a run while it goes on, and one line of it where there is no terminal."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slimebus.cli.config import RunConfig
from slimebus.cli.formatting import count, duration

if TYPE_CHECKING:
    from rich.console import RenderableType

BARS = "▁▂▃▄▅▆▇█"
SPARKLINE_STEPS = 40
RATE_EVERY_S = 3.0


class LivePanel:
    """Shows the broker's status; remembers rewards, accuracies and token counts between looks.

    title: what runs, such as "RL" or "warm-up". dataset: whose mean reward is the accuracy; empty: of none.
    """

    def __init__(self, title: str, config: RunConfig, dataset: str) -> None:
        self.title, self.dataset, self.started = title, dataset, time.monotonic()
        self.num_steps, self.max_staleness = config.rollout.num_rollout, config.broker.max_staleness
        self.signal = "loss" if config.algorithm.is_supervised else "reward"
        self.status: dict[str, Any] = {}
        self.signals: dict[int, float] = {}
        """Step -> its mean reward, or its loss in a run of SFT."""
        self.accuracies: dict[int, float] = {}
        """Version -> mean reward of the dataset."""
        self._counted_at, self._tokens, self._tokens_per_s = self.started, 0.0, 0.0

    def take(self, status: dict[str, Any]) -> None:
        """From now on show this status (docs/protocol.md)."""
        self.status = status
        self.signals |= {row["step"]: row["metrics"].get(self.signal, 0.0) for row in status["steps"]}
        for row in status["evaluations"]:
            if row["dataset"] == self.dataset and row["done"] and row["mean_reward"] is not None:
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
        bar = ProgressBar(total=max(1, self.num_steps), completed=self.status["step"], width=SPARKLINE_STEPS)
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
        shown = [f"{label} {texts[label]}" for label in ("step", self.signal, "accuracy", "lag", "tokens/s")]
        return " | ".join([f"{self.title} {shown[0]}", *shown[1:], *self.status["waiting"][:1]])

    def texts(self) -> dict[str, str]:
        """What is shown, by its label. Lags are in versions, over the trained tokens of the last step."""
        status, workers, groups = self.status, self._workers(), self.status["groups"]
        last = status["steps"][-1]["metrics"] if status["steps"] else {}
        signals, accuracies = self._in_order(self.signals), [f"{value:.3f}" for value in self._in_order(self.accuracies)]
        trainer_tokens_per_s = last.get("num_tokens", 0.0) / max(1e-9, last.get("train_s", 0.0) + last.get("wait_s", 0.0))
        plural = "worker" if len(workers) == 1 else "workers"
        return {
            "step": f"{status['step']}/{self.num_steps}  {time_left(time.monotonic() - self.started, status['step'], self.num_steps)}",
            self.signal: f"{signals[-1]:.3f}" if signals else "none yet",
            "accuracy": f"{accuracies[-1]} ({accuracies[0]} before)" if accuracies else "not measured yet",
            "lag": f"mean {last.get('lag_mean', 0.0):.2f}, largest {last.get('lag_max', 0.0):g}, bound {self.max_staleness:g}",
            "tokens/s": f"trainer {count(trainer_tokens_per_s)}, {len(workers)} {plural} {count(self._tokens_per_s)}",
            "groups": ", ".join(f"{groups[phase]} {phase}" for phase in ("queued", "leased", "ready", "assigned")),
            "waiting": "; ".join(status["waiting"]) or "nobody",
        }

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


def time_left(seconds: float, step: int, num_steps: int) -> str:
    """Time taken, and the time that the remaining steps take at the mean pace so far."""
    if not 0 < step < num_steps:
        return duration(seconds)
    return f"{duration(seconds)}, {duration(seconds / step * (num_steps - step))} left"
