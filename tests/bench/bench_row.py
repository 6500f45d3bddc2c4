"""One row of a bench: a value, what it is compared with, and whether the ratio meets its goal."""

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


def _round(value: float) -> float:
    return float(f"{value:.4g}")
