"""One row of a bench: a value, what it is compared with, and whether the ratio meets its goal; and values measured in turns."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Row = dict[str, Any]


def row(name: str, value: float, unit: str, reference: float, goal: str, *, ratio: float | None = None) -> Row:
    """ratio is value / reference unless given; goal is `>= x` or `<= x` of the ratio, or empty."""
    ratio = value / reference if ratio is None else ratio
    sign, _, bound = goal.partition(" ")
    ok = True if not goal else ratio >= float(bound) if sign == ">=" else ratio <= float(bound)
    return {
        "name": name,
        "value": _round(value),
        "unit": unit,
        "reference": _round(reference),
        "ratio": _round(ratio),
        "goal": goal,
        "ok": ok,
    }


def within(name: str, value: float, unit: str, sign: str, bound: float) -> Row:
    """A value with a goal of its own: `bound` is the reference, and the ratio to it must be `>= 1` or `<= 1`."""
    return row(name, value, unit, bound, f"{sign} 1")


def absent(name: str, why: str) -> Row:
    """A row that could not be measured here, and why; it misses no goal."""
    return {"name": name, "value": None, "unit": why, "reference": None, "ratio": None, "goal": "", "ok": True}


def plain(name: str, value: float, unit: str) -> Row:
    """A value that is compared with nothing."""
    return row(name, value, unit, value, "")


def median_of(turns: int, measures: Mapping[str, Callable[[], float]]) -> dict[str, float]:
    """The median of each measure, taken in turns after one that does not count: what slows the machine for a while slows them all."""
    found: dict[str, list[float]] = {name: [] for name in measures}
    for turn in range(turns + 1):
        for name, measure in measures.items():
            value = measure()
            if turn:
                found[name].append(value)
    return {name: statistics.median(values) for name, values in found.items()}


def percentile(values: Iterable[float], percent: int = 99) -> float:
    """The smallest value that so many percent of them do not exceed; NaN of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] if ordered else math.nan


def _round(value: float) -> float:
    return float(f"{value:.4g}")
