"""Joining, fencing, silence."""

from typing import Any

from slimebus import messages as m


def test_the_same_instance_keeps_its_epoch_and_another_fences_it(desk: Any) -> None:
    first = desk.epochs["w"]
    assert desk.join("w", "rollout", instance="1").epoch == first
    (group,) = desk.lease()
    assert desk.join("w", "rollout", instance="2").epoch > first
    assert desk.status["groups"]["queued"] == 1, "the older process is taken for dead"
    assert desk.ask("w", m.Heartbeat(), epoch=first).code == "fenced"
    assert desk.ask("w", m.Hello(role="rollout", instance="1"), epoch=0).code == "fenced", "it may not take the place back"
    assert desk.put(group).result == "discarded"


def test_a_second_trainer_fences_the_first_and_its_waiting_request(desk: Any) -> None:
    waiting = desk.send("t", m.Batch(step=0, wait_s=60.0))
    desk.join("t2", "trainer")
    assert desk.answers[waiting].code == "fenced"
    assert desk.ask("t", m.Heartbeat()).code == "fenced"
    assert desk.ask("t", m.Hello(role="trainer", instance="1"), epoch=0).code == "fenced"
    assert desk.ask("t2", m.Resume(step=0, version=0, lineage="M")) == m.Ok()


def test_fencing_survives_a_restart_of_the_broker(desk: Any) -> None:
    old = desk.epochs["w"]
    desk.join("w", "rollout", instance="2")
    desk.restart()
    assert desk.ask("w", m.Heartbeat(), epoch=old).code == "fenced"
    assert isinstance(desk.ask("w", m.Heartbeat()), m.HeartbeatReply)


def test_strangers_other_runs_and_other_roles_are_refused(desk: Any) -> None:
    assert desk.ask("nobody", m.Heartbeat()).code == "not_joined"
    assert desk.ask("w", m.Batch(step=0, wait_s=0.0)).code == "role"
    assert desk.ask("t", m.Lease(want=1, wait_s=0.0)).code == "role"
    assert desk.ask("x", m.Hello(role="king", instance="1"), epoch=0).code == "protocol"


def test_a_silent_client_is_gone_until_it_is_heard_again(desk: Any) -> None:
    desk.pass_time(21.0)
    assert {c["name"]: c["state"] for c in desk.status["clients"]}["w"] == "gone"
    desk.ask("w", m.Heartbeat(state="serving", lineage="L", serving=0))
    assert {c["name"]: c["state"] for c in desk.status["clients"]}["w"] == "serving"


def test_the_status_names_who_is_silent(desk: Any) -> None:
    desk.now += 30
    desk.ask("w", m.Heartbeat())
    assert "trainer t has been silent for 30 s" in desk.status["waiting"]


def test_status_needs_no_hello_and_no_run(desk: Any) -> None:
    assert isinstance(desk.ask("anyone", m.Status(), run=""), m.StatusReply)
    assert desk.ask("anyone", m.Status(), run="another").code == "wrong_run"
    assert desk.ask("w", m.Heartbeat(), run="").code == "wrong_run"


def test_a_hello_that_shares_a_protocol_version_is_welcomed_with_it(desk: Any) -> None:
    newer = desk.ask("w", m.Hello(role="rollout", instance="1", protocol=7, oldest=1), epoch=0)
    assert isinstance(newer, m.Welcome)
    assert newer.protocol == m.PROTOCOL_VERSION


def test_a_hello_without_a_common_protocol_version_is_refused_with_both_ranges(desk: Any) -> None:
    answer = desk.ask("w", m.Hello(role="rollout", instance="1", protocol=9, oldest=8, release="9.0"), epoch=0)
    assert isinstance(answer, m.Error)
    assert answer.code == "protocol_version"
    assert "'w' (slimebus 9.0) speaks protocol 8 to 9, this process" in answer.text


def test_a_group_whose_worker_dies_again_and_again_is_dead_in_the_end(new_desk: Any) -> None:
    desk = new_desk(max_attempts=3)
    desk.begin()
    for instance in ("2", "3", "4"):
        (group,) = desk.lease()
        desk.join("w", "rollout", instance=instance)
    assert desk.state.meta.ended == {"dead": 1}
    assert desk.store.get("ended", group.group) is not None


def test_a_fenced_trainer_leaves_no_timer_behind(desk: Any) -> None:
    desk.send("t", m.Batch(step=0, wait_s=60.0))
    desk.join("t2", "trainer")
    assert ("parked batch", 0) not in desk.state.timers._deadline


def test_a_late_hello_of_the_trainer_that_finished_does_not_reopen_the_run(desk: Any) -> None:
    hello = m.Hello(role="trainer", instance="2", born=50.0)
    desk.epochs["t"] = desk.ask("t", hello, epoch=0).epoch
    assert desk.ask("t", m.Resume(step=0, version=0, lineage="M")) == m.Ok()
    assert desk.ask("t", m.Finish()) == m.Ok()
    desk.ask("t", m.Goodbye())
    for late in (hello, m.Hello(role="trainer", instance="0", born=40.0)):
        desk.ask("t", late, epoch=0)
        assert desk.ask("w", m.Heartbeat()).finished
    desk.ask("t", m.Hello(role="trainer", instance="3", born=60.0), epoch=0)
    assert not desk.ask("w", m.Heartbeat()).finished
