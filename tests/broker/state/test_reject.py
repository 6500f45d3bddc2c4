"""Groups that the trainer cannot train, or that somebody drops while it has them: they leave their batch, which is chosen anew."""

from typing import Any

import pytest

from slimebus.bus import messages as m


def reject(desk: Any, step: int, *names: str, **how: Any) -> Any:
    return desk.ask("t", m.Reject(step=step, groups=dict.fromkeys(names, "a token id of 200000")), **how)


def drop(desk: Any, name: str) -> m.EditReply:
    reply = desk.ask("op", m.Edit(action="drop", groups=[name], reason="poison"), run="")
    assert isinstance(reply, m.EditReply), reply
    return reply


def test_a_rejected_group_leaves_its_batch_and_its_prompt_is_sampled_again(desk: Any) -> None:
    one, two = desk.fill(2)
    assert desk.batch(0) == [one, two]
    assert reject(desk, 0, one) == m.Ok()
    assert desk.batch(0) == [], "one is missing"
    assert desk.fill(1) == [one]
    assert desk.batch(0) == [two, one]
    assert desk.state.groups.by_id[one].failures == 1
    assert desk.status["counted"]["rejected, of worker w"] == 1
    assert desk.status["waste"]["rejected: a token id of 200000"]["groups"] == 1
    assert any("of worker w was rejected by the trainer: a token id" in note for note in desk.notes)


def test_a_batch_that_lost_a_group_is_filled_from_what_is_ready_and_keeps_its_version(desk: Any) -> None:
    names = desk.fill(4)
    assert desk.batch(0) == names[:2]
    assert desk.batch(1) == names[2:]
    reply = desk.ask("t", m.Batch(step=1, wait_s=0.0))
    reject(desk, 0, names[1])
    assert desk.batch(0) == [names[0], names[2]]
    desk.publish(1)
    assert desk.ask("t", m.Commit(step=0)) == m.Ok()
    assert desk.fill(1, 1) == [names[1]]
    again = desk.ask("t", m.Batch(step=1, wait_s=0.0))
    assert ([g.group for g in again.groups], again.version) == ([names[3], names[1]], reply.version)


def test_a_group_that_is_rejected_too_often_is_dead_with_the_reason(begun_desk: Any) -> None:
    desk = begun_desk(max_attempts=2, batch_size=1)
    (name,) = desk.fill(1)
    for _ in range(2):
        assert desk.batch(0) == [name]
        reject(desk, 0, name)
        desk.fill(1)
    assert desk.status["groups"]["dead"] == 1
    assert desk.state.find_ended(name).reason == "rejected: a token id of 200000"
    assert desk.batch(0) == ["0/1"]


@pytest.mark.parametrize("restarts", [False, True])
def test_a_repeated_reject_changes_nothing_even_when_the_group_is_in_the_batch_again(desk: Any, restarts: bool) -> None:
    one, two = desk.fill(2)
    desk.batch(0)
    number = desk.send("t", m.Reject(step=0, groups={one: "bad"}))
    desk.fill(1)
    assert desk.batch(0) == [two, one]
    if restarts:
        desk.restart()
    assert desk.ask("t", m.Reject(step=0, groups={one: "bad"}), request=number) == m.Ok()
    assert desk.batch(0) == [two, one]


def test_a_reject_of_another_batch_changes_nothing(desk: Any) -> None:
    names = desk.fill(3)
    desk.batch(0)
    for step, name in ((0, names[2]), (0, "0/99"), (1, names[0]), (7, names[0]), (-1, names[0])):
        before = desk.status["groups"]
        answer = reject(desk, step, name)
        assert answer == m.Ok() if step >= 0 else answer.code == "protocol"
        assert desk.status["groups"] == before
    desk.train(0)
    assert reject(desk, 0, names[0]).code == "step"
    assert desk.ask("w", m.Reject(step=1, groups={})).code == "role"


def test_the_samples_of_a_rejected_group_are_neither_fetched_nor_kept(desk: Any) -> None:
    one, two = desk.fill(2)
    desk.batch(0)
    reject(desk, 0, one)
    assert desk.ask("t", m.Fetch(groups=[two, one])).code == "not_assigned"
    assert [key for key, _ in desk.store.scan("payloads")] == [two]
    desk.restart()
    assert desk.fill(1) == [one]
    assert desk.batch(0) == [two, one]


def test_a_group_that_is_assigned_and_not_fetched_is_dropped_and_the_batch_gets_another(desk: Any) -> None:
    names = desk.fill(3)
    desk.batch(0)
    assert drop(desk, names[0]).done == {names[0]: "dropped"}
    assert desk.ask("t", m.Fetch(groups=names[:2])).code == "not_assigned"
    assert desk.batch(0) == names[1:]
    assert desk.status["groups"]["dropped"] == 1


@pytest.mark.parametrize("restarts", [False, True])
def test_a_group_that_the_trainer_has_is_dropped_when_the_trainer_goes_back_or_rejects_it(desk: Any, restarts: bool) -> None:
    """A trainer that ends of a group is restarted; it must not get that group again."""
    names = desk.fill(3)
    desk.batch(0)
    desk.ask("t", m.Fetch(groups=names[:2]))
    if restarts:
        desk.restart()
    assert "step 0 has its samples" in drop(desk, names[0]).done[names[0]]
    assert desk.batch(0) == names[:2], "the trainer may be training it"
    desk.begin(step=0, version=0, lineage="M")
    assert desk.batch(0) == names[1:]
    desk.ask("t", m.Fetch(groups=names[1:]))
    drop(desk, names[1])
    reject(desk, 0, names[1])
    assert desk.status["groups"]["dropped"] == 2
    assert not desk.state.groups.by_id.get(names[1])


def test_a_trained_group_that_was_dropped_stays_trained_unless_the_trainer_goes_back(desk: Any) -> None:
    names = desk.fill(2)
    desk.batch(0)
    desk.ask("t", m.Fetch(groups=names))
    drop(desk, names[0])
    desk.train(0)
    assert desk.status["groups"]["committed"] == 2
    drop(desk, names[1])
    desk.begin(step=0, version=0, lineage="M")
    assert desk.status["groups"]["dropped"] == 2
