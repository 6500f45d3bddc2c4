"""1 when the final answer equals the label as a number or as text.

The final answer is the last \\boxed{...}, else what follows the last `####`, else the last number of the response.
"""

import re
from fractions import Fraction

from rollout.response import Response

MAX_DIGITS = 1000
"""Longer numbers are compared as text: `1e999999999` would take for ever."""
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?")


def reward(response: Response) -> float:
    """1.0 or 0.0."""
    answer = final_answer(response.text)
    return float(answer is not None and same(answer, stated_answer(str(response.label))))


def stated_answer(label: str) -> str:
    """A label's own answer: boxed, after `####`, or all of it."""
    boxed = _last_boxed(label)
    return label.rpartition("####")[2].strip() if boxed is None else boxed


def final_answer(text: str) -> str | None:
    """The answer a response commits to, or None."""
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed
    if "####" in text:
        return text.rpartition("####")[2].strip()
    numbers = NUMBER.findall(text)
    return numbers[-1] if numbers else None


def _last_boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 1, start + len("\\boxed{")
    for i in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[begin:i].strip()
    return None


def same(a: str, b: str) -> bool:
    """Equal as numbers (commas, units of money and percent signs aside), else equal as text without spaces."""
    x, y = _number(a), _number(b)
    if x is not None and y is not None:
        return x == y
    return a.replace(" ", "") == b.replace(" ", "")


def _number(text: str) -> Fraction | None:
    cleaned = text.strip().strip("$").rstrip("%.").replace(",", "").replace(" ", "")
    exponent = re.search(r"[eE][+-]?(\d[\d_]*)$", cleaned)
    if len(cleaned) > MAX_DIGITS or (exponent is not None and (len(exponent[1]) > 4 or int(exponent[1]) > MAX_DIGITS)):
        return None
    try:
        return Fraction(cleaned)
    except (ValueError, ZeroDivisionError):
        return None
