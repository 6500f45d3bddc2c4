"""The list of error codes in docs/protocol.md is what the sources raise: each code, retryable or not, no more and no less."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.store.interface import Damaged, StoreError
from slimebus.bus import errors
from slimebus.bus.sample_table import BadSamples

ROOT = Path(__file__).parents[2]
CLASSES = {cls.__name__: cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, errors.SlimebusError)}
CLASSES |= {"StoreError": StoreError, "Damaged": Damaged, "BadSamples": BadSamples}
SOURCES = [
    *(file for file in (ROOT / "broker").rglob("*.py") if "buffer" not in file.parts),  # `slimebus buffer` works on files
    *(ROOT / "slimebus" / "bus" / "transport").glob("server.py"),
    ROOT / "slimebus" / "bus" / "envelope.py",
    ROOT / "slimebus" / "bus" / "protocol.py",
]
AT_THE_START = ("UsageError", "DataError", "HookError")
"""Raised before a broker serves anyone, or told by the status: never an answer. A ConfigError is one where a setting is changed."""


def raised() -> Iterator[tuple[str, bool, str]]:
    """(code, retryable, where) of every error that is made in the sources with a code that can be read there."""
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                yield from _of_call(node, f"{file.relative_to(ROOT)}:{node.lineno}", is_state="state" in file.parts)


def _of_call(node: ast.Call, where: str, *, is_state: bool) -> Iterator[tuple[str, bool, str]]:
    name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr if isinstance(node.func, ast.Attribute) else ""
    if name in AT_THE_START or (name == "ConfigError" and not is_state) or (name not in CLASSES and name != "Error"):
        return
    told = {keyword.arg: keyword.value for keyword in node.keywords}
    cls = CLASSES.get(name)
    code, retryable = told.get("code"), told.get("retryable")
    if code is None and cls is not None:
        value = cls.code
    elif isinstance(code, ast.Constant):
        value = str(code.value)
    else:
        return  # handed on from an error that is made elsewhere
    if retryable is None or isinstance(retryable, ast.Constant):
        yield value, bool(retryable.value) if retryable is not None else bool(cls and cls.retryable), where


def listed() -> dict[str, bool]:
    """Code -> retryable, as the page has it."""
    items = (ROOT / "docs" / "protocol.md").read_text().split("### Codes", 1)[1].split("\n#", 1)[0]
    return {code: word == "yes" for code, word in re.findall(r"^- `(\w+)` \((yes|no)\):", items, re.MULTILINE)}


@pytest.mark.parametrize(("code", "retryable", "where"), sorted(set(raised())))
def test_the_page_has_the_code_and_says_whether_to_try_again(code: str, retryable: bool, where: str) -> None:
    assert listed().get(code) == retryable, f"{where} answers {code!r}, retryable {retryable}; docs/protocol.md says {listed().get(code)}"


def test_the_page_has_no_code_that_nobody_sends() -> None:
    assert listed().keys() == {code for code, _, _ in raised()}


def test_an_error_that_says_neither_its_code_nor_its_class_is_not_sent() -> None:
    assert not [where for code, _, where in raised() if code == "error"], "every error on the wire has a code of its own"
