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


def _round(value: float) -> float:
    return float(f"{value:.4g}")
