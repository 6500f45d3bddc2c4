"""Joining, fencing, silence."""

import copy
import math
from typing import Any

import msgspec
import pytest

from broker.state import status
from broker.state.clients import FORGET_S
from slimebus.bus import messages as m
from slimebus.bus import protocol


def test_the_same_instance_keeps_its_epoch_and_another_fences_it(desk: Any) -> None:
    first = desk.epochs["w"]
    assert desk.join("w", "rollout", instance="1").epoch == first
    (group,) = desk.lease()
    assert desk.join("w", "rollout", instance="2").epoch > first
    assert desk.status["groups"]["queued"] == 1, "the older process is taken for dead"
    assert desk.ask("w", m.Heartbeat(), epoch=first).code == "fenced"
    assert desk.ask("w", m.Hello(role="rollout", instance="1"), epoch=0).code == "fenced", "it may not take the place back"
    assert desk.put(group).result == "discarded"


def test_no_epoch_or_lease_is_given_twice_after_a_power_cut_took_the_last_writes(desk: Any) -> None:
    kept = copy.deepcopy(desk.store)
    given, lease = desk.join("w2", "rollout").epoch, desk.lease()[0].lease
    desk.store, desk.first_id = kept, 1_000
    desk.restart()
    assert desk.join("w3", "rollout").epoch > given
    assert desk.lease()[0].lease > lease


def test_a_second_trainer_fences_the_first_and_its_waiting_request(desk: Any) -> None:
    waiting = desk.send("t", m.Batch(step=0, wait_s=60.0))
    desk.join("t2", "trainer")
    assert waiting not in desk.answers, "the first trains until the second resumes"
    assert desk.ask("t2", m.Resume(step=0, version=0, lineage="M")) == m.Ok()
    assert desk.answers[waiting].code == "fenced"
    assert desk.ask("t", m.Heartbeat()).code == "fenced"
    assert desk.ask("t", m.Hello(role="trainer", instance="1"), epoch=0).code == "fenced"


def test_fencing_survives_a_restart_of_the_broker(desk: Any) -> None:
    old = desk.epochs["w"]
    desk.join("w", "rollout", instance="2")
    desk.restart()
    assert desk.ask("w", m.Heartbeat(), epoch=old).code == "fenced"
    assert isinstance(desk.ask("w", m.Heartbeat()), m.HeartbeatReply)


def test_strangers_other_runs_and_other_roles_are_refused(desk: Any) -> None:
    assert desk.ask("nobody", m.Heartbeat()).code == "not_joined"
    assert desk.ask("nobody", m.Heartbeat(), run="other").code == "wrong_run"
    unknown = desk.ask("nobody", m.Heartbeat(), run="")
    assert (unknown.code, "say hello first" in unknown.text) == ("not_joined", True)
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


def test_a_process_that_is_called_as_its_role_is_named_once(new_desk: Any) -> None:
    desk = new_desk()
    desk.join("trainer", "trainer")
    desk.ask("trainer", m.Heartbeat(state="starting: loads its model"))
    assert "trainer is starting: loads its model" in desk.status["waiting"]
    assert "everyone waits for trainer, which has joined and is loading" in desk.status["waiting"]


def test_of_more_processes_than_the_status_lists_the_sick_come_first(new_desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = new_desk()
    for name in ("w1", "w2", "silent", "w3", "blocked", "t"):
        desk.join(name, "trainer" if name == "t" else "rollout")
    desk.now += 5
    for name in ("w1", "w2", "w3", "t"):
        desk.ask(name, m.Heartbeat())
    desk.ask("blocked", m.Heartbeat(blocked_s=9.0))
    assert [client["name"] for client in desk.status["clients"]] == ["t", "silent", "blocked", "w1", "w2", "w3"]
    monkeypatch.setattr(status, "MAX_CLIENTS", 3)
    assert [client["name"] for client in desk.status["clients"]] == ["t", "silent", "blocked"]


def test_the_status_names_the_release_of_each_process(desk: Any) -> None:
    desk.ask("x", m.Hello(role="rollout", instance="1", release="0.0.9" + "x" * 999), epoch=0)
    desk.restart()
    assert {c["name"]: c["release"] for c in desk.status["clients"]}["x"] == ("0.0.9" + "x" * 999)[:64]
    assert desk.status["release"] == protocol.release()


def test_status_needs_no_hello_and_no_run(desk: Any) -> None:
    assert isinstance(desk.ask("anyone", m.Status(), run=""), m.StatusReply)
    assert desk.ask("anyone", m.Status(), run="another").code == "wrong_run"
    assert desk.ask("w", m.Heartbeat(), run="").code == "not_joined"


def test_a_hello_that_shares_a_protocol_version_is_welcomed_with_it(desk: Any) -> None:
    newer = desk.ask("w", m.Hello(role="rollout", instance="1", protocol=7, oldest=1), epoch=0)
    assert isinstance(newer, m.Welcome)
    assert newer.protocol == m.PROTOCOL_VERSION


def test_a_hello_without_a_common_protocol_version_is_refused_with_both_ranges(desk: Any) -> None:
    answer = desk.ask("w", m.Hello(role="rollout", instance="1", protocol=9, oldest=8, release="9.0"), epoch=0)
    assert isinstance(answer, m.Error)
    assert answer.code == "protocol_version"
    assert "'w' (slimebus 9.0) speaks protocol 8 to 9, this process" in answer.text


def test_a_fenced_trainer_leaves_no_timer_behind(desk: Any) -> None:
    desk.send("t", m.Batch(step=0, wait_s=60.0))
    desk.join("t2", "trainer")
    assert ("batch", 0) in desk.state.timers._deadline, "it trains until the other resumes"
    desk.ask("t2", m.Resume(step=0, version=0, lineage="M"))
    assert ("batch", 0) not in desk.state.timers._deadline


def test_only_the_finisher_resuming_or_another_trainer_reopens_a_finished_run(desk: Any) -> None:
    assert desk.ask("t", m.Finish()) == m.Ok()
    desk.ask("t", m.Goodbye())
    for late in ("1", "0"):
        desk.ask("t", m.Hello(role="trainer", instance=late), epoch=0)
        assert desk.ask("w", m.Heartbeat()).finished, "a hello alone reopens nothing"
    desk.join("t", "trainer", "3")
    desk.ask("t", m.Resume(step=0, version=0, lineage="M"))
    assert not desk.ask("w", m.Heartbeat()).finished


@pytest.mark.parametrize(("name", "role"), [("w", "rollout"), ("t", "trainer")])
def test_a_late_hello_of_a_dead_process_changes_nothing_for_the_living_one(desk: Any, name: str, role: str) -> None:
    (group,) = desk.lease()
    for instance in ("0", "0", "00"):
        assert isinstance(desk.ask(name, m.Hello(role=role, instance=instance, take_over=True), epoch=0), m.Welcome)
    assert desk.put(group).result == "accepted"
    assert isinstance(desk.ask("t", m.Batch(step=0, wait_s=0.0)), m.BatchReply)
    desk.restart()
    assert isinstance(desk.ask(name, m.Heartbeat()), m.HeartbeatReply)


def test_of_two_living_processes_of_one_name_the_newer_goes_on_and_the_older_is_told(desk: Any) -> None:
    (group,) = desk.lease()
    newer = desk.ask("w", m.Hello(role="rollout", instance="2", take_over=True), epoch=0).epoch
    newest = desk.ask("w", m.Hello(role="rollout", instance="3", take_over=True), epoch=0).epoch
    assert isinstance(desk.ask("w", m.Heartbeat(), epoch=newer), m.HeartbeatReply)
    assert desk.ask("w", m.Heartbeat(leases=[group.lease])).code == "fenced"
    assert desk.ask("w", m.Hello(role="rollout", instance="1"), epoch=0).code == "fenced"
    assert group.lease not in desk.state.groups.by_lease
    assert isinstance(desk.ask("w", m.Heartbeat(), epoch=newest), m.HeartbeatReply)
    assert desk.ask("w", m.Heartbeat(), epoch=newer).code == "fenced"
    assert desk.ask("w", m.Heartbeat(), epoch=newest + 1).code == "not_joined"


def test_a_process_that_was_welcomed_before_the_broker_restarted_keeps_its_epoch(desk: Any) -> None:
    newer = desk.ask("w", m.Hello(role="rollout", instance="2", take_over=True), epoch=0).epoch
    desk.restart()
    newest = desk.ask("w", m.Hello(role="rollout", instance="3", take_over=True), epoch=0).epoch
    assert desk.ask("w", m.Hello(role="rollout", instance="2", take_over=True), epoch=0).epoch == newer
    assert isinstance(desk.ask("w", m.Heartbeat(), epoch=newer), m.HeartbeatReply)
    assert isinstance(desk.ask("w", m.Heartbeat(), epoch=newest), m.HeartbeatReply)
    assert desk.ask("w", m.Heartbeat(), epoch=newer).code == "fenced"


def test_a_hello_repeated_by_a_living_process_gives_the_same_epoch_before_and_after_it_speaks(desk: Any) -> None:
    hello = m.Hello(role="rollout", instance="2", take_over=True)
    first = desk.ask("w", hello, epoch=0).epoch
    assert desk.ask("w", hello, epoch=0).epoch == first
    desk.ask("w", m.Heartbeat(), epoch=first)
    assert desk.ask("w", hello, epoch=0).epoch == first


def test_of_two_living_trainers_the_one_that_joined_later_goes_on_once_it_resumes(desk: Any) -> None:
    desk.join("t2", "trainer")
    desk.join("t3", "trainer")
    desk.fill(2)
    assert desk.train(0), "the first trains until another resumes"
    assert desk.ask("t2", m.Batch(step=1, wait_s=0.0)).code == "not_resumed"
    assert desk.ask("t3", m.Resume(step=0, version=0, lineage="M")) == m.Ok()
    for older in ("t", "t2"):
        assert desk.ask(older, m.Heartbeat()).code == "fenced"
        assert desk.ask(older, m.Resume(step=0, version=0, lineage="N")).code == "fenced"
    assert desk.status["lineage"] == "M"


def test_a_trainer_that_had_only_said_hello_when_a_newer_one_resumed_is_told_to_stop(desk: Any) -> None:
    older = desk.ask("t", m.Hello(role="trainer", instance="2", take_over=True), epoch=0).epoch
    desk.join("t2", "trainer")
    assert desk.ask("t2", m.Resume(step=0, version=0, lineage="M")) == m.Ok()
    assert desk.ask("t", m.Hello(role="trainer", instance="2"), epoch=0).code == "fenced"
    assert desk.ask("t", m.Resume(step=0, version=0, lineage="N"), epoch=older).code == "fenced"
    assert desk.ask("t2", m.Publish(lineage="M", version=0, publishers=["tcp://x:1"], digest="d")) == m.Ok()


def test_a_trainer_that_is_not_known_any_more_joins_again_and_goes_on_without_a_resume(desk: Any) -> None:
    desk.pass_time(4000.0)
    assert desk.ask("t", m.Heartbeat()).code == "not_joined"
    desk.join("t", "trainer")
    assert isinstance(desk.ask("t", m.Batch(step=0, wait_s=0.0)), m.BatchReply)


def test_fenced_names_are_forgotten_in_the_end(desk: Any) -> None:
    for number in range(3):
        desk.join(f"t{number}", "trainer")
        desk.ask(f"t{number}", m.Resume(step=0, version=0, lineage=f"M{number}"))
    desk.pass_time(30.0)
    desk.pass_time(4000.0)
    assert not [name for name in desk.state.clients if name.startswith("t")]


# --- a place that is taken ---

PLACES = [("w", "rollout"), ("t", "trainer"), ("t2", "trainer")]
"""Who comes: under the name of the living one or, as a trainer, under any."""


def newcomer(role: str, **how: Any) -> m.Hello:
    return m.Hello(role=role, instance="new", **how)


@pytest.mark.parametrize(("name", "role"), PLACES)
def test_a_living_process_is_not_replaced_and_the_newcomer_is_told_where_it_is(new_desk: Any, name: str, role: str) -> None:
    desk = new_desk()
    holder = name if role == "rollout" else "t"
    desk.ask(holder, m.Hello(role=role, instance="1", host="node3", pid=4711), epoch=0)
    desk.epochs[holder] = desk.state.clients[holder].epoch
    desk.now += 0.5
    waits = desk.ask(name, newcomer(role), epoch=0)
    assert (waits.code, waits.retryable) == ("name_in_doubt", True)
    assert "(process 4711 on host node3, last heard 0.5 s ago), which counts as gone after 3 s of silence" in waits.text
    desk.now += 0.5
    desk.ask(holder, m.Heartbeat())
    desk.now += 0.5
    refused = desk.ask(name, newcomer(role), epoch=0)
    assert (refused.code, refused.retryable) == ("name_in_use", False)
    assert "(process 4711 on host node3, last heard 0.5 s ago) is alive; --take-over replaces it" in refused.text
    assert isinstance(desk.ask(holder, m.Heartbeat()), m.HeartbeatReply), "it goes on"


@pytest.mark.parametrize(("name", "role"), PLACES)
def test_a_process_whose_connection_is_gone_is_replaced_at_once(desk: Any, name: str, role: str) -> None:
    assert isinstance(desk.ask(name, newcomer(role), epoch=0, is_alone=True), m.Welcome)


@pytest.mark.parametrize(("name", "role"), PLACES)
def test_a_living_process_is_replaced_with_take_over(desk: Any, name: str, role: str) -> None:
    welcome = desk.ask(name, newcomer(role, take_over=True), epoch=0)
    desk.ask(name, m.Resume(step=0, version=0, lineage="M") if role == "trainer" else m.Heartbeat(), epoch=welcome.epoch)
    assert desk.ask("w" if role == "rollout" else "t", m.Heartbeat()).code == "fenced"


def test_a_connected_process_is_replaced_once_three_heartbeats_are_missing_and_fenced_when_it_wakes_up(desk: Any) -> None:
    desk.ask("w", m.Heartbeat())
    for _ in range(3):
        desk.pass_time(1.0)
        assert desk.ask("w", newcomer("rollout"), epoch=0).retryable
    desk.pass_time(0.1)
    epoch = desk.ask("w", newcomer("rollout"), epoch=0).epoch
    assert isinstance(desk.ask("w", m.Heartbeat(), epoch=epoch), m.HeartbeatReply)
    assert desk.ask("w", m.Heartbeat()).code == "fenced"


@pytest.mark.parametrize("is_restarted", [False, True])
def test_of_two_newcomers_the_one_that_was_stopped_wakes_up_too_late(desk: Any, is_restarted: bool) -> None:
    first = desk.ask("w", newcomer("rollout"), epoch=0, is_alone=True)
    stopped = desk.ask("w", m.Hello(role="rollout", instance="stopped"), epoch=0, is_alone=True)
    if is_restarted:
        desk.restart()
    for _ in range(4):
        assert isinstance(desk.ask("w", m.Heartbeat(), epoch=first.epoch), m.HeartbeatReply)
        desk.now += 1.0
    assert desk.ask("w", m.Heartbeat(), epoch=stopped.epoch).code == "not_joined"
    for _ in range(2):
        desk.now += 1.0
        refused = desk.ask("w", m.Hello(role="rollout", instance="stopped"), epoch=0)
        assert isinstance(desk.ask("w", m.Heartbeat(), epoch=first.epoch), m.HeartbeatReply)
    assert refused.code == "name_in_doubt"
    desk.now += 1.0
    assert desk.ask("w", m.Hello(role="rollout", instance="stopped"), epoch=0).code == "name_in_use"
    assert isinstance(desk.ask("w", m.Heartbeat(), epoch=first.epoch), m.HeartbeatReply)


def test_what_a_dead_process_had_sent_is_no_sign_of_life(desk: Any) -> None:
    """Its last heartbeat is read behind the hello of the process that comes after it."""
    assert desk.ask("w", newcomer("rollout"), epoch=0).retryable
    desk.now += 0.1
    desk.ask("w", m.Heartbeat())
    assert isinstance(desk.ask("w", newcomer("rollout"), epoch=0, is_alone=True), m.Welcome)


def test_of_several_newcomers_each_waits_for_a_sign_after_its_own_hello(desk: Any) -> None:
    assert desk.ask("w", newcomer("rollout"), epoch=0).retryable
    desk.now += 0.1
    desk.ask("w", m.Heartbeat())
    desk.now += 0.1
    later = m.Hello(role="rollout", instance="newer")
    assert desk.ask("w", later, epoch=0).retryable
    assert not desk.ask("w", newcomer("rollout"), epoch=0).retryable
    assert desk.ask("w", later, epoch=0).retryable
    for number in range(100):
        desk.ask("w", m.Hello(role="rollout", instance=str(100 + number)), epoch=0)
    assert len(desk.state.clients["w"].newcomers) <= 8


def test_a_process_that_is_not_heard_when_the_broker_is_back_is_replaced_after_two_seconds_and_a_heartbeat(begun_desk: Any) -> None:
    desk = begun_desk(heartbeat_s=10.0, lease_s=30.0, client_timeout_s=60.0)
    assert desk.ask("w", newcomer("rollout"), epoch=0).retryable
    desk.restart()
    desk.now += 11.9
    assert desk.ask("w", newcomer("rollout"), epoch=0).retryable, "the others connect anew, and speak when a heartbeat is due"
    desk.now += 0.2
    assert isinstance(desk.ask("w", newcomer("rollout"), epoch=0), m.Welcome)


def test_a_process_that_is_heard_when_the_broker_is_back_keeps_its_place(desk: Any) -> None:
    desk.restart()
    assert desk.ask("w", newcomer("rollout"), epoch=0).retryable
    desk.now += 1.0
    desk.ask("w", m.Heartbeat())
    desk.now += 1.5
    assert not desk.ask("w", newcomer("rollout"), epoch=0).retryable


def test_no_other_role_keeps_a_trainer_out_or_takes_its_place(desk: Any) -> None:
    desk.join("trainer", "rollout")
    welcome = desk.ask("trainer", m.Hello(role="trainer", instance="2", take_over=True), epoch=0)
    assert isinstance(desk.ask("trainer", m.Resume(step=0, version=0, lineage="M"), epoch=welcome.epoch), m.Ok)
    refused = desk.ask("trainer", m.Hello(role="rollout", instance="3", take_over=True), epoch=0)
    assert refused.code == "name_in_doubt"
    assert "--take-over" not in refused.text


# --- a finished run that goes on ---


def finished(new_desk: Any) -> Any:
    desk = new_desk(num_steps=1)
    desk.begin()
    desk.fill(2)
    desk.train(0)
    assert desk.ask("t", m.Finish()) == m.Ok()
    assert desk.ask("w", m.Heartbeat()).finished
    return desk


@pytest.mark.parametrize("has_left", [True, False])
@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_worker_that_joins_a_restarted_broker_before_the_trainer_is_not_told_that_the_run_is_finished(
    new_desk: Any, num_steps: int, has_left: bool
) -> None:
    """The run is extended, or its last checkpoint is gone: the trainer that joins says whether there is more to train."""
    desk = finished(new_desk)
    for name in ("w", "t") if has_left else ():
        desk.ask(name, m.Goodbye())
    desk.rules = msgspec.structs.replace(desk.rules, num_steps=num_steps)
    desk.restart()
    desk.join("w", "rollout", instance="of the next session")
    assert not desk.ask("w", m.Heartbeat()).finished
    assert not desk.machine.is_over
    waits = desk.send("w", m.Lease(want=1, wait_s=60.0, lineage="M", serving=1))
    assert waits not in desk.answers
    desk.join("t", "trainer", instance="of the next session")
    assert desk.ask("t", m.Resume(step=num_steps - 1, version=num_steps - 1, lineage="M")) == m.Ok()
    desk.publish(num_steps - 1, "M")
    if num_steps == 1:
        assert desk.batch(0), "the samples of its only step are still here"
        return
    desk.ask("w", m.Heartbeat(lineage="M", serving=1))
    assert desk.answers[waits].groups


def test_who_was_there_when_the_run_finished_is_told_so_by_a_broker_that_was_restarted(new_desk: Any) -> None:
    desk = finished(new_desk)
    desk.restart()
    assert desk.ask("t", m.Heartbeat()).finished
    desk.join("late", "rollout")
    assert desk.ask("late", m.Heartbeat()).finished


@pytest.mark.parametrize("name", ["w", "of a worker that nobody knew"])
def test_a_restarted_broker_believes_in_the_finish_once_all_who_were_there_are_silent(new_desk: Any, name: str) -> None:
    """The trainer has left and the last worker died while the broker was down: nobody is left who could say that the run is finished."""
    desk = finished(new_desk)
    desk.ask("t", m.Goodbye())
    desk.restart()
    desk.join(name, "rollout", instance="2")
    desk.pass_time(19.0)
    assert not desk.ask(name, m.Heartbeat()).finished
    desk.pass_time(1.0)
    assert desk.hints[-1].finished
    assert desk.ask(name, m.Heartbeat()).finished
    desk.ask(name, m.Goodbye())
    assert desk.machine.is_over


def test_a_restarted_broker_to_which_nobody_comes_back_after_the_finish_ends(new_desk: Any) -> None:
    desk = finished(new_desk)
    desk.restart()
    assert not desk.machine.is_over
    desk.pass_time(20.0)
    assert desk.machine.is_over


def test_a_trainer_that_joins_a_restarted_broker_after_the_finish_is_waited_for(new_desk: Any) -> None:
    """It is of another session and loads its model: it will say whether there is more to train. Should it die, nobody waits for it."""
    desk = finished(new_desk)
    desk.restart()
    desk.join("t", "trainer", instance="of the next session")
    for _ in range(5):
        desk.pass_time(10.0)
        desk.ask("t", m.Heartbeat())
    assert not desk.machine.state.is_finished
    desk.pass_time(20.0)
    desk.pass_time(20.0)
    assert desk.machine.is_over


def test_a_trainer_that_is_loading_is_not_waited_for_to_join(new_desk: Any) -> None:
    desk = new_desk()
    assert desk.status["waiting"] == ["everyone waits for a trainer to join"]
    desk.join("t", "trainer")
    assert desk.status["waiting"] == ["everyone waits for trainer t, which has joined and is loading"]


# --- heartbeats ---


def test_a_heartbeat_that_counts_the_leases_keeps_all_of_them(desk: Any) -> None:
    groups = desk.lease(3)
    beat = m.Heartbeat(lineage="L", serving=0, num_leases=3, lease_sum=sum(g.lease for g in groups))
    for _ in range(4):
        desk.pass_time(6.0)
        assert not desk.ask("w", beat).list_leases
    assert desk.state.groups.count("leased") == 3


def test_a_worker_that_counts_other_leases_is_asked_for_its_list_and_told_what_is_lost(desk: Any) -> None:
    held, _ = desk.lease(2)
    counted = {"lineage": "L", "serving": 0, "num_leases": 2, "lease_sum": held.lease + 999}
    assert desk.ask("w", m.Heartbeat(**counted)).list_leases
    told = desk.ask("w", m.Heartbeat(**counted, leases=[held.lease, 999]))
    assert (told.list_leases, told.lost, told.surplus) == (False, [999], [])
    desk.pass_time(6.0)
    assert not desk.ask("w", m.Heartbeat(lineage="L", serving=0, num_leases=1, lease_sum=held.lease)).list_leases, "the list is known"
    desk.pass_time(5.0)
    assert [g.id for g in desk.state.groups.leased_by("w")] == [held.group], "what it does not work on runs out"


def test_a_lease_whose_answer_is_on_its_way_does_not_have_the_list_asked_for(desk: Any) -> None:
    (first,) = desk.lease()
    counted = m.Heartbeat(lineage="L", serving=0, num_leases=1, lease_sum=first.lease)
    desk.ask("w", counted)
    desk.lease()
    assert not desk.ask("w", counted).list_leases


def test_a_restarted_broker_knows_the_leases_that_a_heartbeat_counts(desk: Any) -> None:
    groups = desk.lease(2)
    desk.restart()
    assert not desk.ask("w", m.Heartbeat(lineage="L", serving=0, num_leases=2, lease_sum=sum(g.lease for g in groups))).list_leases


def test_a_metric_that_json_cannot_hold_is_left_out(desk: Any) -> None:
    desk.ask("w", m.Heartbeat(metrics={"tokens": math.nan, "serving_s": math.inf, "queued": 1e308, "running": 2.0}))
    assert next(c for c in desk.status["clients"] if c["name"] == "w")["metrics"] == {"running": 2.0}


@pytest.mark.parametrize("name", ["w\x1b[2J", "w\nrun r: finished", "w\u202e"])
def test_a_name_that_is_not_printable_joins_no_run(desk: Any, name: str) -> None:
    refused = desk.ask(name, m.Hello(role="rollout", instance="1"))
    assert (refused.code, name in desk.state.clients) == ("protocol", False)
    assert "not printable" in refused.text


@pytest.mark.timeout(30)
def test_a_silent_client_is_forgotten_at_its_deadline_however_that_is_rounded(new_desk: Any) -> None:
    """A deadline that is reached, while the seconds to it are not, fell due again and again: the broker stood still for ever."""
    forget_s = FORGET_S + 20.0
    for heard_at in (100.0 + i * 0.1234567 for i in range(10_000)):
        if (heard_at + forget_s) - heard_at < forget_s:
            desk = new_desk(client_timeout_s=20.0)
            desk.now = heard_at
            desk.join("w", "rollout")
            desk.pass_time(20.0)
            assert desk.state.clients["w"].is_gone
            desk.now = heard_at + forget_s
            desk.perform(desk.machine.tick(desk.now))
            assert "w" not in desk.state.clients
            return
    pytest.fail("no moment is rounded like that")


def test_workers_that_take_every_place_keep_no_trainer_out(new_desk: Any) -> None:
    desk = new_desk(max_clients=2)
    desk.join("w1", "rollout")
    desk.join("w2", "rollout")
    assert desk.ask("w3", m.Hello(role="rollout", instance="1"), epoch=0).code == "busy"
    assert isinstance(desk.ask("t", m.Hello(role="trainer", instance="1"), epoch=0), m.Welcome)


def test_a_key_that_takes_most_places_leaves_the_last_ones_to_others(new_desk: Any) -> None:
    desk = new_desk(max_clients=16)

    def join(name: str, key: str, role: str = "rollout") -> m.Message:
        answer = desk.ask(name, m.Hello(role=role, instance="1"), epoch=0, key=key)
        assert isinstance(answer, m.Message)
        return answer

    answers = [join(f"w{i}", "stolen") for i in range(16)]
    assert [type(answer) for answer in answers] == [m.Welcome] * 14 + [m.Error] * 2
    assert answers[-1] == m.Error(code="busy", text="14 processes have joined, 14 with the key 'stolen' (max_clients)", retryable=True)
    assert isinstance(join("c", "consumer", "consumer"), m.Welcome)
    assert isinstance(join("n7", "node7"), m.Welcome)
    assert getattr(join("n8", "node8"), "code", "") == "busy", "every place is taken"
    assert isinstance(join("t", "trainer", "trainer"), m.Welcome)


def test_what_a_heartbeat_says_for_people_is_bounded_and_printable(desk: Any) -> None:
    metrics = {"m" * 4000: 1.0, "tokens": 2.0}
    engines = [m.EngineReport(url="http://" + "h" * 4000, model="\x1b[31m", state="serving")]
    desk.ask("w", m.Heartbeat(state="\x1b]0;title\x07", metrics=metrics, engines=engines))
    client = desk.state.clients["w"]
    assert client.metrics == {"tokens": 2.0}
    assert client.state.isprintable()
    assert len(client.engines[0].url) == 256
    assert client.engines[0].model.isprintable()
