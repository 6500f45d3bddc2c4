"""A worker whose event loop is blocked beats on; it is shown as blocked, and gets no more groups."""

from typing import Any

from broker.state import diagnosis
from slimebus.bus import messages as m


def beat(desk: Any, blocked_s: float = 0.0, at: str = "/home/u/probe.py:7") -> None:
    leases = [group.lease.id for group in desk.state.groups.leased_by("w")]
    desk.ask(
        "w", m.Heartbeat(state="serving", lineage="L", serving=0, leases=leases, blocked_s=blocked_s, blocked_at=at if blocked_s else "")
    )


def row(desk: Any) -> dict[str, Any]:
    return next(client for client in desk.status["clients"] if client["name"] == "w")


def test_a_blocked_worker_is_shown_as_blocked_and_named_as_whom_the_run_waits_for(desk: Any) -> None:
    desk.lease(1)
    desk.join("v", "rollout")
    desk.lease(1, name="v")
    desk.send("t", m.Batch(step=0, wait_s=600.0))
    beat(desk, 37.0)
    desk.now += 1.0
    assert row(desk)["state"] == "blocked for 38 s at /home/u/probe.py:7"
    waiting = desk.status["waiting"]
    assert "rollout w is blocked for 38 s at /home/u/probe.py:7" in waiting
    assert "1 leased by w, blocked for 38 s at /home/u/probe.py:7" in waiting[0]
    beat(desk)
    assert row(desk)["state"] == "serving"
    assert not [line for line in desk.status["waiting"] if "blocked" in line]


def test_of_two_workers_the_blocked_one_is_whom_the_run_waits_for(desk: Any) -> None:
    desk.join("v", "rollout")
    desk.lease(1)
    desk.lease(1, name="v")
    assert diagnosis.batch_cause(desk.state, 0).who == ["v", "w"]
    beat(desk, 8.0)
    assert diagnosis.batch_cause(desk.state, 0).who == ["w"]


def test_a_blocked_worker_is_given_no_group_until_it_goes_on(desk: Any) -> None:
    desk.lease(99)  # what it is given goes to its queue
    desk.send("w", m.Lease(want=4, wait_s=60.0, lineage="L", serving=0), request=77)
    beat(desk, 8.0)
    held = len(desk.state.groups.leased_by("w"))
    first = next(iter(desk.state.groups.leased_by("w")))
    desk.ask("w", m.GiveBack(group=first.id, lease=first.lease.id, outcome="drop", reason="room for another"))
    assert 77 not in desk.answers
    assert len(desk.state.groups.leased_by("w")) == held - 1
    beat(desk)
    assert len(desk.answers[77].groups) == 1


def test_a_process_that_is_gone_is_gone_whatever_it_said_last(desk: Any) -> None:
    beat(desk, 8.0)
    desk.pass_time(21.0)
    assert row(desk)["state"] == "gone"


def test_a_place_is_one_line_of_bounded_length(desk: Any) -> None:
    beat(desk, 8.0, at="x" * 5000 + "/pro\nbe.py:7")
    assert row(desk)["state"].endswith("/pro\\nbe.py:7")
    assert len(row(desk)["state"]) < 300
