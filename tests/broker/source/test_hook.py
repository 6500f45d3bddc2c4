"""A user's source, well and badly behaved."""

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
import torch

from broker.source import FileRows, HookSource, load_source
from broker.state.prompt_source import GroupResult
from slimebus.bus.errors import HookError


class Counting:
    """Gives numbered prompts and keeps what it was told."""

    def __init__(self) -> None:
        self.given, self.told, self.trouble = 0, [], ""

    def take(self) -> Any:
        self.given += 1
        if self.trouble == "raise":
            raise ValueError("no luck")
        answers = {"text": "hi", "no prompt": {"label": 3}, "none": None, "odd": {"prompt": "x", "label": object()}}
        return answers.get(self.trouble, {"prompt": f"p{self.given}", "metadata": {"n": self.given}})

    def feedback(self, result: GroupResult) -> None:
        self.told.append([result.id, result.outcome, result.metadata.get("n")])
        if self.trouble == "feedback":
            raise RuntimeError("no feedback")

    def save(self) -> Any:
        return {"save raises": None, "no map": 3, "odd": {"x": object()}}.get(self.trouble, {"given": self.given, "told": self.told})

    def load(self, state: dict[str, Any]) -> None:
        self.given, self.told = state["given"], state["told"]


def _result(number: int, outcome: str = "trained") -> GroupResult:
    return GroupResult(id=f"hook/{number}", attempt=1, outcome=outcome, reason="")


def _state(source: HookSource) -> Any:
    saved = source.saved()
    return None if saved is None else msgspec.msgpack.decode(saved)


def test_each_prompt_comes_with_the_state_behind_it() -> None:
    source = HookSource("h", Counting())
    assert _state(source) == {"given": 0, "told": []}
    assert _state(source) is None, "nothing changed"
    prompt = source.take(7)
    assert prompt is not None
    assert (prompt.id, prompt.position) == ("hook/7", 7)
    assert msgspec.msgpack.decode(prompt.record) == {"prompt": "p1", "label": None, "metadata": {"n": 1}}
    assert _state(source)["given"] == 1
    source.feedback(_result(7))
    assert _state(source)["told"] == [["hook/7", "trained", 1]]


def test_a_source_goes_on_from_its_saved_state_and_finds_metadata_in_the_store() -> None:
    source = HookSource("h", Counting())
    prompt = source.take(0)
    saved = source.saved()
    assert prompt is not None
    assert saved is not None
    after = HookSource("h", Counting())
    after.restore(saved)
    after.record_of = {prompt.id: prompt.record}.get
    after.feedback(_result(0, "requeued"))
    after.feedback(_result(0))
    assert _state(after) == {"given": 1, "told": [["hook/0", "requeued", 1], ["hook/0", "trained", 1]]}


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ("raise", "source hook h: take failed: ValueError: no luck"),
        ("text", "take gave str; expected a map with a 'prompt', or None"),
        ("no prompt", "take gave no prompt: no 'prompt'"),
        ("odd", "take gave no prompt: cannot be kept: Encoding objects of type object"),
        ("no map", "save gave int; expected a map"),
    ],
)
def test_a_take_that_fails_changes_nothing(trouble: str, reason: str) -> None:
    hook = Counting()
    source = HookSource("h", hook)
    source.take(0)
    source.feedback(_result(0))
    source.saved()
    hook.trouble = trouble
    for _ in range(2):
        with pytest.raises(HookError, match=reason):
            source.take(1)
    assert (hook.given, len(hook.told)) == (1, 1)
    assert _state(source) is None
    assert source.report()["failures"] == 2
    hook.trouble = ""
    prompt = source.take(1)
    assert prompt is not None
    assert msgspec.msgpack.decode(prompt.record)["prompt"] == "p2", "none was lost"


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("method", ["take", "save", "feedback"])
@pytest.mark.parametrize(
    "problem",
    [SystemExit(3), asyncio.CancelledError(), Unprintable(), OSError("no file a\udc80")],
    ids=lambda problem: type(problem).__name__,
)
def test_whatever_a_source_raises_is_a_failure_that_can_be_shown(method: str, problem: BaseException) -> None:
    hook = Counting()
    source = HookSource("h", hook)
    good = getattr(hook, method)
    setattr(hook, method, Mock(side_effect=problem))
    with contextlib.suppress(HookError):
        source.take(0)
    source.feedback(_result(0))
    source.saved()
    report = source.report()
    assert report["last_failure"].startswith(f"{method} failed: {type(problem).__name__}")
    msgspec.json.encode(report)
    setattr(hook, method, good)
    assert source.take(1) is not None


@pytest.mark.parametrize(
    "number", [np.int32(7), np.float32(0.5), np.float64(0.25), np.bool_(True), torch.tensor(3)], ids=lambda n: type(n).__name__
)
def test_numpy_and_torch_scalars_of_a_source_are_numbers(number: Any) -> None:
    hook = Mock(spec=Counting, take=lambda: {"prompt": "p", "label": number, "metadata": {"n": number}}, save=lambda: {"at": number})
    source = HookSource("h", hook)
    prompt = source.take(0)
    assert prompt is not None
    value = number.item()
    assert msgspec.msgpack.decode(prompt.record) == {"prompt": "p", "label": value, "metadata": {"n": value}}
    assert _state(source) == {"at": value}
    source.feedback(_result(0))
    assert hook.feedback.call_args.args[0].metadata == {"n": value}


class Unreadable(dict[str, Any]):
    """A map that fails in every way that it can be read."""

    def _fail(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("not now")

    __contains__ = __getitem__ = __iter__ = __len__ = __eq__ = __bool__ = get = keys = items = values = copy = _fail  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    "given",
    [Unreadable(prompt="p"), {"prompt": "p", "metadata": Unreadable(a=1)}, {"prompt": [Unreadable(role="user")]}],
    ids=["all", "metadata", "message"],
)
def test_a_map_of_the_sources_own_class_that_fails_is_a_failed_take(given: Any) -> None:
    source = HookSource("h", Mock(spec=Counting, take=lambda: given, save=lambda: {}))
    with pytest.raises(HookError, match=r"source hook h: take gave .*not now"):
        source.take(0)
    assert source.report()["failures"] == 1


def test_a_state_of_the_sources_own_class_that_fails_is_a_failed_save() -> None:
    with pytest.raises(HookError, match=r"save gave what cannot be kept: "):
        HookSource("h", Mock(spec=Counting, save=lambda: {"a": Unreadable(b=object())}))


def test_many_prompts_of_a_burst_encode_the_state_twice_and_not_for_each_prompt() -> None:
    hook = Counting()
    source = HookSource("h", hook)
    saves, save = [], hook.save
    hook.save = lambda: saves.append(1) or save()  # type: ignore[func-returns-value]
    for number in range(100):
        source.take(number)
        source.feedback(_result(number))
    assert _state(source) == {"given": 100, "told": hook.told}
    assert len(saves) <= 2


def test_a_take_that_fails_within_a_burst_leaves_the_takes_and_feedback_before_it() -> None:
    hook = Counting()
    source = HookSource("h", hook)
    for number in range(3):
        source.take(number)
        source.feedback(_result(number))
    hook.trouble = "text"
    with pytest.raises(HookError):
        source.take(3)
    assert _state(source) == {"given": 3, "told": [["hook/0", "trained", 1], ["hook/1", "trained", 2], ["hook/2", "trained", 3]]}


def test_feedback_that_came_before_a_take_that_fails_is_not_forgotten() -> None:
    hook = Counting()
    source = HookSource("h", hook)
    source.take(0)
    source.feedback(_result(0))
    hook.trouble = "raise"
    with pytest.raises(HookError):
        source.take(1)
    assert hook.told == [["hook/0", "trained", 1]]


def test_a_source_that_has_nothing_may_change_its_state_by_saying_so() -> None:
    hook = Counting()
    source = HookSource("h", hook)
    source.saved()
    hook.trouble = "none"
    assert source.take(0) is None
    assert _state(source)["given"] == 1


def test_feedback_that_fails_is_counted_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    hook = Counting()
    hook.trouble = "feedback"
    source = HookSource("h", hook)
    source.take(0)
    source.feedback(_result(0))
    assert "group hook/0: source hook h: feedback failed: RuntimeError: no feedback" in caplog.text
    assert source.report() == {"hook": "h", "failures": 1, "last_failure": "feedback failed: RuntimeError: no feedback"}
    assert source.take(1) is not None


def test_a_state_that_cannot_be_saved_after_feedback_leaves_the_last_good_one(caplog: pytest.LogCaptureFixture) -> None:
    hook = Counting()
    source = HookSource("h", hook)
    source.take(0)
    source.saved()
    hook.trouble = "no map"
    source.feedback(_result(0))
    assert source.saved() is None
    assert "its last good state is kept" in caplog.text


def test_a_slow_source_is_named(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.source.hook.SLOW_S", -1.0)
    caplog.set_level(logging.WARNING)
    HookSource("h", Counting()).take(0)
    assert "source hook h: take took 0.00 s; the broker answers nobody meanwhile" in caplog.text


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("class S:\n    pass", r"it has no take\(\)"),
        ("class S:\n    def __init__(self, colour): pass", "unknown argument 'colour'; it may take rows, seed"),
        ("def S():\n    1/0", "ZeroDivisionError"),
        ("S = 3", "expected something callable"),
        ("class S:\n    take = save = load = feedback = lambda self, *a: 3", "save gave int; expected a map"),
    ],
)
def test_what_is_no_source_is_refused_at_the_start(tmp_path: Path, code: str, reason: str) -> None:
    (tmp_path / "s.py").write_text(code)
    with pytest.raises(HookError, match=reason):
        load_source("s.py:S", base=tmp_path, seed=0, rows=None)


def test_a_source_may_read_the_files(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "label": 1}\n{"prompt": "b"}\n')
    (tmp_path / "s.py").write_text(
        "class S:\n"
        "    def __init__(self, rows, seed): self.rows, self.seed = rows, seed\n"
        "    def take(self): return {**self.rows[-1], 'metadata': {'size': len(self.rows), 'all': [r['prompt'] for r in self.rows[:]]}}\n"
        "    def save(self): return {}\n"
        "    def load(self, state): pass\n"
        "    feedback = load\n"
    )
    rows = FileRows([str(tmp_path / "p.jsonl")])
    source = load_source("s.py:S", base=tmp_path, seed=3, rows=rows)
    prompt = source.take(0)
    assert prompt is not None
    assert msgspec.msgpack.decode(prompt.record) == {"prompt": "b", "label": None, "metadata": {"size": 2, "all": ["a", "b"]}}
    assert rows.fingerprint in source.fingerprint
