"""A process that loads a model or waits for its engine is starting, and neither silent nor gone."""

from typing import Any

import pytest

from slimebus.bus import messages as m


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
def test_nobody_waits_for_a_batch_whose_trainer_is_gone(new_desk: Any, leaves: str) -> None:
    desk = new_desk(client_timeout_s=30.0)
    desk.begin()
    desk.send("t", m.Batch(step=0, wait_s=600.0))
    assert any(line.startswith("trainer waits for batch 0") for line in desk.status["waiting"])
    if leaves == "goodbye":
        desk.ask("t", m.Goodbye())
        assert desk.status["parked"] == []
    else:
        desk.pass_time(55.0)
    assert not [line for line in desk.status["waiting"] if "batch" in line]
    assert "everyone waits for a trainer to join" in desk.status["waiting"]
