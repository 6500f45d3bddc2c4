"""Prompts pushed by a client while the run goes on."""

from typing import Any

import msgspec
import pytest

from broker.state import prompts
from slimebus.bus import messages as m


def _records(*texts: str) -> list[bytes]:
    return [msgspec.msgpack.encode({"prompt": text, "label": None, "metadata": {}}) for text in texts]


def _push(desk: Any, key: str, *texts: str, **how: Any) -> Any:
    if "c" not in desk.epochs:
        desk.join("c", "client")
    return desk.ask("c", m.Push(key=key, **how), bulk=_records(*texts))


def _lease(desk: Any, want: int) -> list[str]:
    return [group.group for group in desk.lease(want)]


def test_pushed_prompts_go_before_those_of_the_source_and_those_at_the_front_before_all(desk: Any) -> None:
    assert _push(desk, "k1", "a", "b") == m.PushReply(accepted=2, first="push/0", waiting=2)
    assert _push(desk, "k2", "c", "d", front=True) == m.PushReply(accepted=2, first="front/0", waiting=4)
    assert _push(desk, "k3", "e", front=True).first == "front/2"
    assert _lease(desk, 4) == ["front/0", "front/1", "front/2", "push/0"]
    desk.restart()
    assert desk.store.get("prompts", "push/1") == _records("b")[0]


def test_a_repeated_push_adds_nothing_also_after_a_restart(desk: Any) -> None:
    first = _push(desk, "k", "a", "b")
    for _ in range(2):
        again = _push(desk, "k", "a", "b")
        assert (again.accepted, again.duplicate, again.first, again.waiting) == (0, 2, first.first, 2)
        desk.restart()
        desk.epochs.pop("c")
    assert desk.status["source"]["pushed"] == 2
    assert desk.status["counted"]["prompts pushed"] == 2


def test_a_key_used_for_other_prompts_is_refused(desk: Any) -> None:
    _push(desk, "k", "a", "b")
    for texts in (("a",), ("a", "c"), ("b", "a")):
        assert _push(desk, "k", *texts).code == "push_key"


def test_a_bound_on_waiting_prompts_makes_the_client_wait(begun_desk: Any) -> None:
    desk = begun_desk(max_pushed=3)
    assert _push(desk, "k1", "a", "b").accepted == 2
    busy = _push(desk, "k2", "c", "d")
    assert (busy.code, busy.retryable) == ("busy", True)
    assert desk.store.get("prompts", "push/2") is None
    assert _push(desk, "k3", *"abcd").code == "too_large"
    _lease(desk, 1)
    assert _push(desk, "k2", "c", "d").accepted == 2


@pytest.mark.parametrize(
    ("message", "bulk", "reason"),
    [
        (m.Push(key=""), _records("a"), "expected 1 to 128"),
        (m.Push(key="k" * 129), _records("a"), "expected 1 to 128"),
        (m.Push(key="k"), [], "0 prompts; expected 1 to 4096"),
        (m.Push(key="k"), [*_records("a"), b"\x01"], "prompt 1: not a msgpack map"),
        (m.Push(key="k"), [msgspec.msgpack.encode({"prompt": 3})], "prompt 0: 'prompt' must be text"),
        (m.Push(key="k"), [msgspec.msgpack.encode({"label": 3})], "prompt 0: no 'prompt'"),
        (m.Push(key="k"), [b"\x81\xa6prompt\xa1\xff"], "prompt 0: not a msgpack map"),
    ],
)
def test_what_is_no_prompt_is_refused_and_nothing_of_it_kept(desk: Any, message: m.Push, bulk: list[bytes], reason: str) -> None:
    desk.join("c", "client")
    answer = desk.ask("c", message, bulk=bulk)
    assert answer.code == "protocol"
    assert reason in answer.text
    assert desk.status["source"]["pushed"] == 0


def test_a_push_is_bounded_in_all_and_not_only_prompt_by_prompt(desk: Any) -> None:
    desk.join("c", "client")
    answer = desk.ask("c", m.Push(key="k"), bulk=5 * _records("x" * (15 << 20)))
    assert (answer.code, answer.retryable) == ("too_large", False)
    assert desk.status["source"]["pushed"] == 0
    assert desk.ask("c", m.Push(key="k"), bulk=4 * _records("x" * (15 << 20))).accepted == 4


@pytest.mark.parametrize("name", ["w", "t"])
def test_only_a_client_may_push(desk: Any, name: str) -> None:
    assert desk.ask(name, m.Push(key="k"), bulk=_records("a")).code == "role"


def test_a_finished_run_takes_no_more_prompts(desk: Any) -> None:
    desk.ask("t", m.Finish())
    assert _push(desk, "k", "a").code == "finished"


def test_a_parked_worker_is_given_what_is_pushed(begun_desk: Any) -> None:
    desk = begun_desk(prompts=0, waits_for_push=True)
    number = desk.send("w", m.Lease(want=1, wait_s=60.0, lineage="L", serving=0))
    batch = desk.send("t", m.Batch(step=0, wait_s=60.0))
    assert batch not in desk.answers, "the run waits for pushes and does not end"
    assert "waiting for prompts to be pushed" in " ".join(desk.status["waiting"])
    _push(desk, "k", "a")
    assert [group.group for group in desk.answers[number].groups] == ["push/0"]


def test_without_waiting_for_pushes_the_run_ends_with_its_prompts(begun_desk: Any) -> None:
    desk = begun_desk(prompts=1)
    _push(desk, "k", "a")
    assert desk.fill(2) == ["push/0", "0/0"]
    assert desk.batch(0) == ["push/0", "0/0"]
    assert desk.ask("t", m.Batch(step=1, wait_s=0.0)).code == "source_ended"


def test_what_is_pushed_after_the_end_of_the_source_is_trained(begun_desk: Any) -> None:
    desk = begun_desk(prompts=2)
    desk.fill(2)
    desk.train(0)
    assert _lease(desk, 1) == []
    _push(desk, "k", "a", "b")
    assert desk.fill(2, 1) == ["push/0", "push/1"]
    assert desk.train(1) == ["push/0", "push/1"]


def test_a_dropped_prompt_is_gone_and_a_requeued_one_comes_first(desk: Any) -> None:
    _push(desk, "k", "a", "b", "c")
    first, second = desk.lease(2)
    for group, outcome in ((first, "drop"), (second, "requeue")):
        desk.ask("w", m.GiveBack(group=group.group, lease=group.lease, outcome=outcome, reason="x"))
    assert desk.store.get("prompts", "push/0") is None
    assert _lease(desk, 2) == ["push/1", "push/2"]


def test_prompts_that_were_freed_are_not_kept_and_are_counted_where_the_run_begins_anew(desk: Any) -> None:
    _push(desk, "k", "a", "b")
    desk.fill(2)
    desk.train(0, checkpoint=1)
    assert not list(desk.store.scan("prompts"))
    desk.restart()
    assert desk.ask("t", m.Resume(step=0, version=0, lineage="L2")) == m.Ok()
    assert desk.status["counted"]["prompts lost in a rewind"] == 2
    assert any("2 prompts that came once" in note for note in desk.notes)


def test_the_oldest_keys_are_forgotten_beyond_a_bound(desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MAX_KEYS", 2)
    for key in "abc":
        _push(desk, key, key)
    desk.restart()
    desk.epochs.pop("c")
    assert list(desk.state.pushes) == ["b", "c"]
    assert {key for key, _ in desk.store.scan("pushes")} == {"b", "c"}


def test_waiting_prompts_are_no_groups_in_memory(desk: Any) -> None:
    before = len(desk.state.groups.by_id)
    for number in range(10):
        _push(desk, str(number), *map(str, range(200)))
    assert len(desk.state.groups.by_id) == before
    assert prompts.num_waiting(desk.state) == 2000
