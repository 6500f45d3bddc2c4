"""The result of a run as one table."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypedDict

from slimebus.interval import wilson
from slimebus.words import duration

if TYPE_CHECKING:
    from rich.table import Table


class Result(TypedDict):
    """result.json. Times in seconds, lags in versions, fractions and accuracies in 0..1.

    heldout_problems: how many problems both accuracies were measured on. dropped: groups by reason.
    delta_fraction: mean size of a pulled delta, of the full model's. trainer_idle, worker_idle: share of the RL phase spent waiting.
    """

    accuracy_before: float
    accuracy_after: float
    heldout_problems: int
    steps: int
    total_s: float
    rl_s: float
    lag_mean: float
    lag_max: float
    max_staleness: float
    dropped: dict[str, int]
    delta_fraction: float
    trainer_idle: float
    worker_idle: float
    seed: int


def result_table(result: Mapping[str, Any]) -> "Table":
    """Two columns, what and how much, for `rich.print`, from a Result; what was not measured (a missing key) has no row."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in rows(result):
        table.add_row(name, value)
    return table


def rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The table's lines, as rich markup."""
    made: dict[str, Callable[[Any], str]] = {
        "held-out accuracy": _accuracies,
        "steps": lambda r: f"{r['steps']}",
        "time": lambda r: f"{duration(r['rl_s'])} of RL, {duration(r['total_s'])} in all",
        "lag": lambda r: f"mean {r['lag_mean']:.2f}, largest {r['lag_max']:g}, bound {r['max_staleness']:g} versions",
        "groups dropped": lambda r: _dropped(r["dropped"]),
        "delta size": lambda r: f"{r['delta_fraction']:.1%} of the model",
        "trainer idle": lambda r: f"{r['trainer_idle']:.0%}",
        "workers idle": lambda r: f"{r['worker_idle']:.0%}",
        "seed": lambda r: f"{r['seed']}",
    }
    lines = []
    for name, text in made.items():
        try:
            lines.append((name, text(result)))
        except KeyError:
            continue
    return lines


def _accuracies(result: Mapping[str, Any]) -> str:
    n = result["heldout_problems"]
    before, after = (_with_interval(value, n) for value in (result["accuracy_before"], result["accuracy_after"]))
    return f"{before} → [bold green]{after}[/] on {n} problems"


def _with_interval(accuracy: float, n: int) -> str:
    low, high = wilson(accuracy, n)
    return f"{accuracy:.3f} ({low:.3f}–{high:.3f})"


def _dropped(reasons: dict[str, int]) -> str:
    if not reasons:
        return "none"
    from rich.markup import escape

    by_size = sorted(reasons.items(), key=lambda item: -item[1])
    return ", ".join(f"{n} {escape(reason)}" for reason, n in by_size)
