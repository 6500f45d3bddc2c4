"""The result of a run as one table."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from slimebus.telemetry.formatting import format_duration
from slimebus.telemetry.scores import wilson

if TYPE_CHECKING:
    from rich.table import Table

REASONS = {"zero_variance": "groups with equal rewards", "too_stale": "too stale", "stale": "too stale"}
"""Why groups trained nothing, in words."""
Result = Mapping[str, Any]
"""The keys of result.json. Times in seconds, lags in versions, fractions and accuracies in 0..1:

accuracy_before, accuracy_after, heldout_problems (on how many both were measured), steps, rl_s, total_s, lag_mean, lag_max, max_staleness,
dropped (groups by reason), delta_fraction (mean size of a pulled delta, of the full model's), trainer_idle and worker_idle (share of the
RL phase spent waiting), seed.
"""


def result_table(result: Result) -> "Table":
    """Two columns, what and how much, for `rich.print`; what was not measured (a missing key) has no row."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, text in rows(result).items():
        table.add_row(name, text)
    return table


def rows(result: Result) -> dict[str, str]:
    """The table's lines, as rich markup."""
    found = {}
    for name, text in TEXTS.items():
        try:
            found[name] = text(result)
        except KeyError:
            continue
    return found


def _accuracies(result: Result) -> str:
    n = result["heldout_problems"]
    before, after = (_with_interval(result[key], n) for key in ("accuracy_before", "accuracy_after"))
    return f"{before} → [bold green]{after}[/] on {n} problems"


def _with_interval(mean: float, n: int) -> str:
    interval = " ({:.3f}–{:.3f})".format(*wilson(mean, n)) if 0 <= mean <= 1 else ""  # of rewards from 0 to 1
    return f"{mean:.3f}{interval}"


def _time(result: Result) -> str:
    in_all = f" of RL, {format_duration(result['total_s'])} in all" if "total_s" in result else ""
    return f"{format_duration(result['rl_s'])}{in_all}"


def _dropped(result: Result) -> str:
    from rich.markup import escape

    by_size = sorted(result["dropped"].items(), key=lambda item: -item[1])
    return ", ".join(f"{n} {escape(REASONS.get(reason, reason))}" for reason, n in by_size) or "none"


TEXTS: dict[str, Callable[[Result], str]] = {
    "held-out reward": _accuracies,
    "steps": lambda r: f"{r['steps']}",
    "time": _time,
    "lag": lambda r: f"mean {r['lag_mean']:.2f}, largest {r['lag_max']:g}, bound {r['max_staleness']:g} versions",
    "trained nothing": _dropped,
    "delta size": lambda r: f"{r['delta_fraction']:.1%} of the model",
    "trainer idle": lambda r: f"{r['trainer_idle']:.0%}",
    "workers idle": lambda r: f"{r['worker_idle']:.0%}",
    "seed": lambda r: f"{r['seed']}",
}
