"""A run whose trainer has finished: what its end waits for, for how long, and who is told."""

from typing import Any

import pytest

from broker.state.rules import HeldOutSet
from slimebus.bus import messages as m

HELD = {"held": HeldOutSet(num_prompts=2, num_samples=1), "other": HeldOutSet(num_prompts=1, num_samples=1)}
WHY = "no connected worker serves version 1 and the trainer that could serve it has left"
TIMEOUT_S = 20.0


@pytest.fixture
def ending(new_desk: Any) -> Any:
    """A run of one step whose last version, 1, is to be evaluated: the trainer has finished and is there, its worker serves version 0."""
    return finished(new_desk(eval_datasets=HELD, eval_first=False, num_steps=1))


def finished(desk: Any) -> Any:
    desk.begin()
    desk.fill(2)
    desk.train(0)
    assert desk.ask("t", m.Finish()) == m.Ok()
    return desk


def beat(desk: Any, name: str, serving: int = 0) -> bool:
    """A heartbeat; True once the run is finished."""
    leases = [group.lease.id for group in desk.state.groups.leased_by(name)]
    return bool(desk.ask(name, m.Heartbeat(state="serving", lineage="L", serving=serving, leases=leases)).finished)


def wait(desk: Any, seconds: float, **serving: int) -> None:
    """Time passes second by second, with the heartbeats of these workers, and of t where it is named."""
    for _ in range(int(seconds)):
        desk.pass_time(1.0)
        for name, version in serving.items():
            beat(desk, name, version)


def leave(desk: Any, *names: str) -> None:
    for name in names:
        assert desk.ask(name, m.Goodbye()) == m.Ok()


def test_an_evaluation_that_nobody_can_make_ends_and_the_run_with_it(ending: Any) -> None:
    leave(ending, "t")
    wait(ending, TIMEOUT_S - 1, w=0)
    assert ending.status["state"] == "evaluating"
    wait(ending, 1, w=0)
    assert ending.status["state"] == "finished"
    assert beat(ending, "w")
    assert f"evaluation of version 1 ended with 0 of 3 prompts: {WHY}" in ending.notes
    rows = [(row["dataset"], row["done"], row["reason"]) for row in ending.status["evaluations"]]
    assert rows == [("held", True, WHY), ("other", True, WHY)]
    assert [row["reason"] for row in ending.rows if "evaluation" in row] == [WHY, WHY]
    assert ending.status["moves"]["eval queued>done no worker serves its version"] == 3
    leave(ending, "w")
    assert ending.machine.is_over


def test_a_worker_that_pulls_is_waited_for_as_long_as_the_trainer_is_there(ending: Any) -> None:
    wait(ending, 300, w=0, t=0)
    assert ending.status["state"] == "evaluating"
    for group in ending.lease(9, serving=1):
        ending.put(group, version=1)
    assert beat(ending, "w", 1)
    assert {row["reason"] for row in ending.status["evaluations"]} == {""}


def test_a_version_that_is_loaded_after_the_trainer_left_is_evaluated(ending: Any) -> None:
    leave(ending, "t")
    wait(ending, TIMEOUT_S - 1, w=0)
    beat(ending, "w", 1)
    wait(ending, 300, w=1)
    assert ending.status["state"] == "evaluating"
    beat(ending, "w", m.NO_VERSION)  # its engine ended: from now on, not from when the trainer left
    wait(ending, TIMEOUT_S - 1, w=m.NO_VERSION)
    assert ending.status["state"] == "evaluating"
    wait(ending, 1, w=m.NO_VERSION)
    assert ending.status["state"] == "finished"


def test_a_killed_trainer_has_left_once_it_was_silent(ending: Any) -> None:
    wait(ending, 2 * TIMEOUT_S - 1, w=0)
    assert ending.status["state"] == "evaluating"
    wait(ending, 2, w=0)
    assert ending.status["state"] == "finished"
    assert ending.status["evaluations"][0]["reason"] == WHY


def test_a_killed_trainer_that_comes_back_begins_the_evaluation_again(ending: Any) -> None:
    wait(ending, 2 * TIMEOUT_S - 2, w=0)
    ending.join("t", "trainer", "2")
    wait(ending, 100, w=0, t=0)
    assert ending.status["state"] == "evaluating"
    ending.begin(step=1, version=1, lineage="M")
    assert not beat(ending, "w")
    assert [(row["version"], row["lineage"], row["done"]) for row in ending.status["evaluations"]] == [
        (1, "L", True),
        (1, "L", True),
        (1, "M", False),
        (1, "M", False),
    ]


def test_what_a_lost_worker_began_another_one_that_serves_the_version_goes_on_with(ending: Any) -> None:
    ending.join("w2", "rollout")
    beat(ending, "w2", 1)
    assert len(ending.lease(9, serving=1)) == 3
    leave(ending, "t")
    wait(ending, 3 * TIMEOUT_S, w2=1)
    assert ending.status["state"] == "evaluating"
    for group in ending.lease(9, serving=1, name="w2"):
        assert ending.put(group, version=1, name="w2").result == "accepted"
    assert beat(ending, "w2", 1)


def test_what_a_lost_worker_began_ends_where_no_other_one_serves_the_version(ending: Any) -> None:
    ending.join("w2", "rollout")
    first, *_ = ending.lease(9, serving=1)
    ending.put(first, version=1)
    leave(ending, "t")
    wait(ending, 2 * TIMEOUT_S + 1, w2=0)
    assert beat(ending, "w2")
    assert f"evaluation of version 1 ended with 1 of 3 prompts: {WHY}" in ending.notes


def test_samples_that_come_after_their_evaluation_has_ended_are_discarded(ending: Any) -> None:
    group, *_ = ending.lease(1, serving=1)
    leave(ending, "t")
    wait(ending, TIMEOUT_S + 1, w=m.NO_VERSION)
    assert ending.status["state"] == "finished"
    assert ending.put(group, version=1).result == "discarded"
    assert ending.ask("w", m.Heartbeat(leases=[group.lease])).lost == [group.lease]


def test_each_of_several_evaluations_is_judged_by_its_own_version(begun_desk: Any) -> None:
    desk = begun_desk(eval_datasets=HELD, num_steps=1, samples_per_prompt=1)
    queued = desk.lease(9)
    for group in [g for g in queued if g.kind == "train"]:
        desk.put(group)
    desk.train(0)
    desk.ask("t", m.Finish())
    leave(desk, "t")
    wait(desk, TIMEOUT_S, w=0)
    assert {(row["version"], row["done"]) for row in desk.status["evaluations"]} == {(0, False), (1, True)}
    for group in [g for g in queued if g.kind == "eval"]:
        assert desk.put(group).result == "accepted"
    assert beat(desk, "w")
    assert {(row["version"], row["reason"]) for row in desk.status["evaluations"]} == {(0, ""), (1, WHY)}


def test_an_evaluation_that_somebody_asked_for_ends_like_the_others_and_is_answered(ending: Any) -> None:
    number = ending.send("op", m.Evaluate(key="k", datasets=["other"], wait_s=600.0), run="")
    leave(ending, "t")
    wait(ending, TIMEOUT_S, w=0)
    assert (ending.answers[number].done, ending.answers[number].reason) == (True, WHY)


def test_a_finished_run_begins_no_evaluation(ending: Any) -> None:
    for group in ending.lease(9, serving=1):
        ending.put(group, version=1)
    done = ending.status["evaluations"][0]["key"]
    assert ending.ask("op", m.Evaluate(key=done), run="").done, "what is done can be asked for"
    assert ending.ask("op", m.Evaluate(key="late"), run="").code == "finished"
    assert beat(ending, "w", 1)


def test_while_the_run_goes_on_an_evaluation_waits_for_a_trainer(begun_desk: Any) -> None:
    desk = begun_desk(eval_datasets=HELD)
    leave(desk, "t")
    wait(desk, 1000, w=m.NO_VERSION)
    assert not any(row["done"] for row in desk.status["evaluations"])


@pytest.mark.parametrize("restart_at", [0, 10, 19, 20])
def test_a_restarted_broker_ends_what_nobody_can_make_and_keeps_what_it_has_ended(ending: Any, restart_at: int) -> None:
    leave(ending, "t")
    wait(ending, restart_at, w=0)
    is_done = ending.status["evaluations"][0]["done"]
    ending.restart()
    assert ending.status["evaluations"][0]["done"] == is_done
    wait(ending, TIMEOUT_S + 1, w=0)
    assert ending.status["evaluations"][0]["reason"] == WHY
    assert beat(ending, "w")


def test_a_restarted_broker_gives_workers_time_to_say_what_they_serve(ending: Any) -> None:
    beat(ending, "w", 1)
    leave(ending, "t")
    ending.restart()
    wait(ending, TIMEOUT_S - 1)
    wait(ending, 100, w=1)
    assert ending.status["state"] == "evaluating"


def test_a_consumer_holds_no_evaluation_that_nobody_can_make(ending: Any) -> None:
    ending.join("critic", "consumer")
    leave(ending, "t")
    wait(ending, TIMEOUT_S, w=0, critic=0)
    assert beat(ending, "critic")
    leave(ending, "w")
    assert ending.machine.is_over


def test_a_broker_that_only_a_consumer_outlived_ends_after_a_restart(new_desk: Any) -> None:
    desk = finished(new_desk(num_steps=1))
    desk.join("critic", "consumer")
    leave(desk, "t", "w")
    desk.restart()
    wait(desk, TIMEOUT_S - 1, critic=0)
    assert not beat(desk, "critic")
    wait(desk, 1, critic=0)
    assert beat(desk, "critic")


def test_the_record_of_a_fenced_trainer_is_nobody_that_a_restarted_broker_waits_for(new_desk: Any) -> None:
    desk = finished(new_desk(num_steps=1))
    desk.join("t2", "trainer")
    desk.ask("t2", m.Resume(step=1, version=1, lineage="M", parent="L"))
    desk.ask("t2", m.Finish())
    leave(desk, "t2", "w")
    desk.restart()
    assert not desk.state.had_members


# --- what waits for what ---


def waiting(desk: Any) -> list[str]:
    return [line for line in desk.status["waiting"] if "silent" not in line]


def test_while_the_run_ends_it_is_told_what_it_waits_for(ending: Any) -> None:
    head = "every step is trained; 0 of 3 prompts are evaluated at version 1"
    assert waiting(ending) == [f"{head}; w still pulls version 1"]
    beat(ending, "w", 1)
    assert waiting(ending) == [f"{head}; none leased; w could work and asks for nothing"]
    groups = ending.lease(2, serving=1)
    assert waiting(ending) == [f"{head}; 2 leased by w"]
    for group in groups:
        ending.put(group, version=1)
    leave(ending, "t")
    ending.pass_time(4.0)
    beat(ending, "w", 0)
    ending.pass_time(2.0)
    head = head.replace("0 of", "2 of")
    assert waiting(ending) == [f"{head}; {WHY}; this evaluation ends in 18 s"]
    wait(ending, TIMEOUT_S, w=0)
    assert waiting(ending) == ["the run is finished; w has not left"]
    leave(ending, "w")
    assert waiting(ending) == []


def test_a_lease_request_that_waits_while_the_run_ends_hides_nothing(ending: Any) -> None:
    assert ending.ask("w", m.Lease(want=1, wait_s=600.0, lineage="L", serving=0)) is None
    assert waiting(ending) == ["every step is trained; 0 of 3 prompts are evaluated at version 1; w still pulls version 1"]
