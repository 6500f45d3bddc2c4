"""1 when the final answer equals the label: as text, or as mathematics by the library math-verify (https://github.com/huggingface/Math-Verify).

The final answer is the last \\boxed{...}, else what follows the last `####`, else what math-verify finds: the last formula or number.
"""

import contextlib
import importlib.util
from decimal import Decimal, InvalidOperation
from typing import Any

from rollout.samples.response import Response

SEARCHED_CHARS = 4096
"""Of the end of a response without a marked answer."""


def missing() -> str:
    """Why it cannot be used here."""
    return "" if importlib.util.find_spec("math_verify") else "needs the package math-verify; pip install 'slimebus[rollout]'"


def reward(response: Response) -> float:
    """1.0 or 0.0."""
    return float(is_answer(stated_answer(response.text), str(response.label), response.text[-SEARCHED_CHARS:]))


def is_answer(answer: str | None, label: str, text: str = "") -> bool:
    """Whether the answer is the label's; None: whichever math-verify finds in the text."""
    from math_verify import parse, verify

    wanted = stated_answer(label) or label.strip()
    if answer is not None:
        if "".join(answer.split()) == "".join(wanted.split()):
            return True
        with contextlib.suppress(InvalidOperation):  # one of them is no plain number; compared so, 1e999999999 takes no time
            return _number(answer) == _number(wanted)
    found: Any = parse(text if answer is None else boxed(answer))
    return bool(found) and bool(verify(parse(boxed(wanted)), found))


def _number(text: str) -> Decimal:
    return Decimal(text.strip("$ ").replace(",", ""))


def boxed(answer: str) -> str:
    """As math-verify finds it for certain."""
    return f"\\boxed{{{answer}}}"


def stated_answer(text: str) -> str | None:
    """What is boxed last, or follows the last `####`."""
    found = last_boxed(text)
    return text.rpartition("####")[2].strip() if found is None and "####" in text else found


def last_boxed(text: str) -> str | None:
    """The content of the last complete \\boxed{...}; None without one."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 1, start + len("\\boxed{")
    for i in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[begin:i].strip()
    return None
