"""Heartbeats: a process that starts, a worker with a blocked event loop, and commands that reach their worker."""

from typing import Any

import pytest

from broker.state import diagnosis
from slimebus.bus import messages as m

ATTACH = m.Command(key="k", action="attach", worker="w", url="http://e:1")


# --- starting: neither silent nor gone ---


@pytest.mark.parametrize(("role", "what"), [("rollout", "starting: waits for its engine"), ("trainer", "starting: loads its model")])
def test_one_who_starts_says_what_it_waits_for_and_is_not_gone(new_desk: Any, role: str, what: str) -> None:
    desk = new_desk(client_timeout_s=30.0)
    desk.join("p", role)
    desk.ask("p", m.Heartbeat(state=what))
    assert f"{role} p is {what}" in desk.status["waiting"]
    desk.pass_time(55.0)
    assert f"{role} p is {what}, last heard 55 s ago" in desk.status["waiting"]
    assert [client["state"] for client in desk.status["clients"]] == [what]
    desk.ask("p", m.Heartbeat(state="serving"))
    assert not [line for line in desk.status["waiting"] if "starting" in line]
    desk.pass_time(55.0)
    assert [client["state"] for client in desk.status["clients"]] == ["gone"]


@pytest.mark.parametrize("leaves", ["goodbye", "silence"])
def test_nobody_waits_for_a_batch_whose_trainer_is_gone(begun_desk: Any, leaves: str) -> None:
    desk = begun_desk(client_timeout_s=30.0)
    desk.send("t", m.Batch(step=0, wait_s=600.0))
    assert any(line.startswith("trainer waits for batch 0") for line in desk.status["waiting"])
    if leaves == "goodbye":
        desk.ask("t", m.Goodbye())
        assert desk.status["parked"] == []
    else:
        desk.pass_time(55.0)
    assert not [line for line in desk.status["waiting"] if "batch" in line]
    assert "everyone waits for a trainer to join" in desk.status["waiting"]


# --- blocked: shown as that, and given no more groups ---


def beat_blocked(desk: Any, blocked_s: float = 0.0, at: str = "/home/u/probe.py:7") -> None:
    leases = [group.lease.id for group in desk.state.groups.leased_by("w")]
    desk.ask(
        "w", m.Heartbeat(state="serving", lineage="L", serving=0, leases=leases, blocked_s=blocked_s, blocked_at=at if blocked_s else "")
    )


def worker_row(desk: Any) -> dict[str, Any]:
    return next(client for client in desk.status["clients"] if client["name"] == "w")


def test_a_blocked_worker_is_shown_as_blocked_and_named_as_whom_the_run_waits_for(desk: Any) -> None:
    desk.lease(1)
    desk.join("v", "rollout")
    desk.lease(1, name="v")
    desk.send("t", m.Batch(step=0, wait_s=600.0))
    beat_blocked(desk, 37.0)
    desk.now += 1.0
    assert worker_row(desk)["state"] == "blocked for 38 s at /home/u/probe.py:7"
    waiting = desk.status["waiting"]
    assert "rollout w is blocked for 38 s at /home/u/probe.py:7" in waiting
    assert "1 leased by w, blocked for 38 s at /home/u/probe.py:7" in waiting[0]
    beat_blocked(desk)
    assert worker_row(desk)["state"] == "serving"
    assert not [line for line in desk.status["waiting"] if "blocked" in line]


def test_of_two_workers_the_blocked_one_is_whom_the_run_waits_for(desk: Any) -> None:
    desk.join("v", "rollout")
    desk.lease(1)
    desk.lease(1, name="v")
    assert diagnosis.batch_cause(desk.state, 0).who == ["v", "w"]
    beat_blocked(desk, 8.0)
    assert diagnosis.batch_cause(desk.state, 0).who == ["w"]


def test_a_blocked_worker_is_given_no_group_until_it_goes_on(desk: Any) -> None:
    desk.lease(99)  # what it is given goes to its queue
    desk.send("w", m.Lease(want=4, wait_s=60.0, lineage="L", serving=0), request=77)
    beat_blocked(desk, 8.0)
    held = len(desk.state.groups.leased_by("w"))
    first = next(iter(desk.state.groups.leased_by("w")))
    desk.ask("w", m.GiveBack(group=first.id, lease=first.lease.id, outcome="drop", reason="room for another"))
    assert 77 not in desk.answers
    assert len(desk.state.groups.leased_by("w")) == held - 1
    beat_blocked(desk)
    assert len(desk.answers[77].groups) == 1


def test_a_process_that_is_gone_is_gone_whatever_it_said_last(desk: Any) -> None:
    beat_blocked(desk, 8.0)
    desk.pass_time(21.0)
    assert worker_row(desk)["state"] == "gone"


def test_a_place_is_one_line_of_bounded_length(desk: Any) -> None:
    beat_blocked(desk, 8.0, at="x" * 5000 + "/pro\nbe.py:7")
    assert worker_row(desk)["state"].endswith("/pro\\nbe.py:7")
    assert len(worker_row(desk)["state"]) < 300


# --- commands: sent with a heartbeat reply until a heartbeat says what became of them ---


def commands_of(desk: Any, worker: str, **about: Any) -> Any:
    return desk.ask(worker, m.Heartbeat(state="serving", **about)).commands


def test_a_command_reaches_its_worker_and_its_outcome_whoever_asked(desk: Any) -> None:
    desk.join("x", "rollout")
    assert desk.ask("op", ATTACH, run="") == m.CommandReply(worker="w")
    assert (commands_of(desk, "x"), commands_of(desk, "w")) == ([], [ATTACH])
    assert commands_of(desk, "w") == [ATTACH], "a reply may have been lost"
    assert desk.ask("op", ATTACH, run="") == m.CommandReply(worker="w")
    done = m.CommandReply(done=True, text="it is there")
    assert commands_of(desk, "w", outcomes={"k": done}) == []
    assert desk.ask("op", ATTACH, run="") == done
    assert commands_of(desk, "w") == [], "asking for an outcome begins nothing anew"


def test_a_worker_that_is_not_there_is_named_with_those_that_are(desk: Any) -> None:
    desk.ask("w", m.Goodbye())
    nobody = desk.ask("op", m.Command(key="k", action="drain"), run="")
    assert (nobody.code, nobody.text) == ("no_worker", "name one of the workers of this run: none")
    for worker in ("w", "x"):
        desk.join(worker, "rollout")
    assert desk.ask("op", m.Command(key="k", action="drain"), run="").text.endswith("of this run: w, x")
    assert desk.ask("op", m.Command(key="k", action="drain", worker="y"), run="").text == "no worker 'y' in this run; there are: w, x"
    desk.ask("x", m.Goodbye())
    assert desk.ask("op", m.Command(key="k", action="drain"), run="") == m.CommandReply(worker="w")


def test_a_worker_cannot_be_given_commands_without_end_nor_by_another_worker(desk: Any) -> None:
    for number in range(64):
        desk.ask("op", m.Command(key=f"k{number}", action="drain"), run="")
    assert desk.ask("op", m.Command(key="one more", action="drain"), run="").code == "busy"
    assert desk.ask("w", m.Command(key="k0", action="drain")).code == "role"
    outcomes = {f"k{number}": m.CommandReply(done=True) for number in range(64)}
    assert commands_of(desk, "w", outcomes=outcomes) == []
    assert commands_of(desk, "w", outcomes={"k64": m.CommandReply(done=True)}) == []


def test_the_status_has_the_engines_that_a_worker_reports(desk: Any) -> None:
    commands_of(desk, "w", engines=[m.EngineReport(url="http://e:1", state="sick", version=3, running=2)])
    (client,) = [client for client in desk.status["clients"] if client["name"] == "w"]
    assert client["engines"] == [{"url": "http://e:1", "model": "", "state": "sick", "version": 3, "running": 2, "is_owned": False}]
