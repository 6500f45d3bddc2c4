"""Requests that wait: how long, and what their repeats change."""

from typing import Any

import pytest

from broker.state import admission, leases
from broker.state.rules import HeldOutSet
from slimebus.bus import messages as m

WAIT_S = 15.0
RESEND_S = 5.0


def asks() -> dict[str, tuple[str, m.Message]]:
    return {
        "lease": ("w", m.Lease(want=1, wait_s=WAIT_S, lineage="L", serving=0)),
        "batch": ("t", m.Batch(step=0, wait_s=WAIT_S)),
        "read": ("c", m.Read(count=1, wait_s=WAIT_S)),
        "evaluate": ("op", m.Evaluate(key="k", wait_s=WAIT_S)),
    }


@pytest.fixture
def busy(begun_desk: Any) -> Any:
    """A desk where every kind of request waits: no room, no batch, nothing to read, an evaluation that nobody makes."""
    desk = begun_desk(eval_datasets={"held": HeldOutSet(num_prompts=1)}, eval_first=False, lease_s=1000.0, client_timeout_s=1000.0)
    desk.join("c", "consumer")
    desk.lease(99)
    return desk


@pytest.mark.parametrize("kind", asks())
def test_a_repeat_of_a_waiting_request_does_not_move_its_deadline(busy: Any, kind: str) -> None:
    name, ask = asks()[kind]
    busy.send(name, ask, request=77)
    for _ in range(2):
        busy.pass_time(RESEND_S)
        busy.send(name, ask, request=77)
        assert 77 not in busy.answers
    busy.pass_time(RESEND_S)
    assert busy.answers[77].reason, "it is told what was waited for"


@pytest.mark.parametrize("kind", asks())
@pytest.mark.parametrize("wait_s", [float("nan"), float("inf"), -1.0, 600.5])
def test_a_wait_that_is_not_0_to_600_seconds_is_refused(busy: Any, kind: str, wait_s: float) -> None:
    name, ask = asks()[kind]
    ask.wait_s = wait_s
    refused = busy.ask(name, ask)
    assert (refused.code, "`body.wait_s`" in refused.text) == ("protocol", True)


@pytest.mark.parametrize("want", [0, -3])
def test_a_lease_of_nothing_is_refused(busy: Any, want: int) -> None:
    assert "Expected `int` >= 1 - at `body.want`" in busy.ask("w", m.Lease(want=want, wait_s=1.0)).text


def test_a_lease_that_waits_when_the_run_finishes_is_answered_at_once(begun_desk: Any) -> None:
    desk = begun_desk()
    desk.lease(99)
    waiting = desk.send("w", m.Lease(want=1, wait_s=600.0, lineage="L", serving=0))
    assert desk.ask("t", m.Finish()) == m.Ok()
    assert (desk.answers[waiting].reason, desk.answers[waiting].finished) == ("the run is finished", True)
    assert desk.ask("w", m.Lease(want=1, wait_s=600.0, lineage="L", serving=0)).finished, "and so is one that comes later"


class Calls:
    """Counts the calls of a function."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
        self.count, self._function = 0, getattr(module, name)
        monkeypatch.setattr(module, name, self)

    def __call__(self, *given: Any, **named: Any) -> Any:
        self.count += 1
        return self._function(*given, **named)


@pytest.fixture
def crowd(begun_desk: Any) -> Any:
    """200 workers of an older version wait for a lease, while an evaluation of the newest version is queued."""
    desk = begun_desk(max_staleness=0, max_clients=500, eval_datasets={"held": HeldOutSet(num_prompts=3)}, eval_first=False)
    desk.fill(2)
    desk.train(0)
    for number in range(200):
        desk.join(f"w{number}", "rollout")
        desk.send(f"w{number}", m.Lease(want=1, wait_s=600.0, lineage="L", serving=0))
    desk.join("c", "client")
    desk.ask("c", m.Evaluate(key="e", wait_s=0.0))
    return desk


def test_bursts_look_at_one_waiting_lease_of_each_kind_while_nobody_can_be_served(crowd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    walked = Calls(monkeypatch, leases, "_next_group_for")
    judged = Calls(monkeypatch, admission, "refusal_for")
    for _ in range(10):
        crowd.ask("w", m.Heartbeat(lineage="L", serving=0))
    crowd.publish(1)
    assert walked.count == 0
    assert judged.count <= 10 * 8
    crowd.ask("w7", m.Heartbeat(lineage="L", serving=1))
    assert [g.kind for g in crowd.state.groups.leased_by("w7")] in (["train"], ["eval"]), "the one that can be served is"
    assert not crowd.state.groups.leased_by("w8")


def test_one_free_place_looks_at_the_first_of_those_that_wait_for_it(begun_desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = begun_desk(max_staleness=0, max_clients=500)
    (group, _) = desk.lease(2)
    for number in range(200):
        desk.join(f"w{number}", "rollout")
        desk.send(f"w{number}", m.Lease(want=1, wait_s=600.0, lineage="L", serving=0))
    looked_at = Calls(monkeypatch, leases, "_can_begin")
    desk.ask("w", m.GiveBack(group=group.group, lease=group.lease, outcome="requeue", reason="leaves"))
    assert [g.id for g in desk.state.groups.leased_by("w0")] == [group.group]
    assert looked_at.count <= 2


def test_an_ended_source_is_not_asked_for_each_waiting_lease(begun_desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = begun_desk(prompts=0, max_clients=500)
    asked = Calls(monkeypatch, desk.source, "take")
    for number in range(50):
        desk.join(f"w{number}", "rollout")
        desk.send(f"w{number}", m.Lease(want=1, wait_s=600.0, lineage="L", serving=0))
    assert asked.count <= 1


def test_the_status_makes_one_reason_for_leases_that_wait_for_the_same(crowd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Calls(monkeypatch, admission, "why_waiting")
    status = crowd.status
    assert made.count <= 4
    assert any(line.startswith("200 workers wait for a lease: ") for line in status["waiting"])
    assert len([row for row in status["parked"] if row["kind"] == "lease"]) == 200


def test_a_silent_worker_that_makes_room_for_another_takes_its_waiting_request_with_it(begun_desk: Any) -> None:
    """It was the newest of its kind, and one request of a kind stands for all."""
    desk = begun_desk(max_staleness=float("inf"), buffer_capacity=4, max_clients=3)
    desk.fill(4)
    desk.join("w2", "rollout")
    ask = m.Lease(want=1, wait_s=600.0, needs_weights=False)
    number, _ = desk.send("w", ask), desk.send("w2", ask)
    for _ in range(40):
        desk.pass_time(1.0)
        for name in ("t", "w"):
            desk.ask(name, m.Heartbeat())
    desk.join("w3", "rollout")
    assert "w2" not in desk.state.clients
    desk.train(0)
    assert len(desk.answers[number].groups) == 1
