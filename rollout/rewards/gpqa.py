"""1 when the option that a response names is the right one of a multiple-choice question, else 0.

As slime's reward of this name, for GPQA (https://arxiv.org/abs/2311.12022). The label is the option's letter, number from 0, or text; of
the metadata `choices` (a list, or a map by letter), `valid_letters` and `correct_letter` count. What stands before `</think>` does not
count. A response that names no letter is right when it has the text of the right option.
"""

import re
import string
from typing import Any

from rollout.samples.response import Response

NAMED = (
    r"(?:answer|option|choice)\s*(?:is|:)?\s*([A-Z])\b",
    r"\b([A-Z])\s*is\s*(?:the)?\s*correct",
    r"final\s*(?:answer|option)\s*(?:is|:)?\s*([A-Z])\b",
)


def reward(response: Response) -> float:
    """1.0 or 0.0."""
    about, text = response.task.metadata, response.text.rpartition("</think>")[2]
    given = about.get("choices") or []
    choices = [str(choice) for choice in (given.values() if isinstance(given, dict) else given)]
    letters = [str(letter).upper() for letter in about.get("valid_letters") or string.ascii_uppercase[: len(choices) or 10]]
    right = _right(response.label, about, choices, letters)
    if (named := _named(text, letters)) and right in letters:
        return float(named == right)
    index = letters.index(right) if right in letters else len(choices)
    texts = [*choices[index : index + 1], about.get("correct_answer", ""), about.get("answer_text", "")]
    texts += [] if right in letters else [response.label]
    return float(any(f" {_plain(one)} " in f" {_plain(text)} " for one in texts if _plain(one)))


def _right(label: Any, about: dict[str, Any], choices: list[str], letters: list[str]) -> str:
    """The right letter; empty where only its text is known."""
    if isinstance(letter := about.get("correct_letter"), str):
        return letter.strip().upper()
    if isinstance(label, int | float):
        return letters[int(label)] if 0 <= label < len(letters) else ""
    if (letter := str(label).strip().upper()) in letters:
        return letter
    plain = [_plain(choice) for choice in choices[: len(letters)]]
    return letters[plain.index(_plain(label))] if _plain(label) in plain else ""


def _named(text: str, letters: list[str]) -> str:
    """The letter that the text commits to, else the last capital that stands alone; empty without."""
    stated = [match[1].upper() for pattern in NAMED if (match := re.search(pattern, text, re.IGNORECASE))]
    alone = reversed(re.findall(r"\b([A-Z])\b", text))
    return next((letter for letter in (*stated, *alone) if letter in letters), "")


def _plain(text: Any) -> str:
    return re.sub(r"[^a-z0-9]+", " ", str(text).lower()).strip()
