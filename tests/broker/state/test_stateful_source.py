"""A source that is told what became of its prompts, through the state machine and through restarts."""

from typing import Any

import msgspec
import pytest
from numbered_prompts import NumberedHook

from broker.source import HookSource
from slimebus.bus import messages as m


class Stage:
    """A desk whose prompts come from the hook."""

    def __init__(self, desk: Any) -> None:
        self.desk = desk
        self.boot()
        desk.epochs.clear()
        desk.begin()

    def boot(self) -> None:
        self.hook = NumberedHook()
        self.desk.source = HookSource("hook.py:Hook", self.hook)
        self.desk.source.record_of = lambda name: self.desk.store.get("prompts", name)
        self.desk.restart()

    @property
    def outcomes(self) -> list[list[Any]]:
        return [told[:3] for told in self.hook.told]

    def saved(self) -> Any:
        return msgspec.msgpack.decode(self.desk.store.get("source", "state"))


@pytest.fixture
def stage(new_desk: Any) -> Stage:
    return Stage(new_desk(prompts=0))


def _give_back(desk: Any, group: m.LeasedGroup, outcome: str, reason: str, **how: Any) -> None:
    assert desk.ask("w", m.GiveBack(group=group.group, lease=group.lease, outcome=outcome, reason=reason, **how)) == m.Ok()


def test_trained_dropped_and_dead_groups_are_told_with_rewards_and_metadata(new_desk: Any) -> None:
    stage = Stage(new_desk(prompts=0, max_attempts=1, max_staleness=2))
    desk = stage.desk
    one, two, three, four = desk.lease(4)
    desk.put(one, rewards=(1.0, None, 0.5))
    _give_back(desk, two, "drop", "filtered", rewards=[1.0, 1.0, float("nan")])
    _give_back(desk, three, "fail", "hook broke")
    desk.put(four, rewards=(0.0,))
    desk.train(0)
    assert stage.hook.told == [
        ["hook/1", 2, "dropped", "returned: filtered", [1.0, 1.0, None], 2],
        ["hook/2", 3, "dead", "returned: hook broke", [], 3],
        ["hook/0", 1, "trained", "", [1.0, None, 0.5], 1],
        ["hook/3", 4, "trained", "", [0.0], 4],
    ]
    assert stage.saved() == {"given": 4, "told": stage.hook.told}


def test_groups_without_reward_spread_are_told(new_desk: Any) -> None:
    stage = Stage(new_desk(prompts=0, needs_spread=True, samples_per_prompt=2))
    (group,) = stage.desk.lease(1)
    stage.desk.put(group, rewards=(1.0, 1.0))
    assert stage.hook.told == [["hook/0", 1, "dropped", "filtered: no reward spread", [1.0, 1.0], 1]]


def test_a_group_that_is_too_old_is_told_and_told_again_when_it_is_trained(stage: Stage) -> None:
    desk = stage.desk
    one, two, late = desk.lease(3)
    desk.put(one)
    desk.put(two)
    desk.train(0)
    desk.fill(2, 1)
    desk.train(1)
    desk.put(late)
    assert stage.hook.told[4:] == [["hook/2", 3, "requeued", "stale", [1.0], 3]]
    assert desk.fill(2, 2) == ["hook/2", "hook/5"]
    desk.train(2)
    assert stage.outcomes[5:] == [["hook/2", 6, "trained"], ["hook/5", 7, "trained"]]


def test_a_restarted_broker_goes_on_with_the_state_of_its_last_transaction(stage: Stage) -> None:
    desk = stage.desk
    desk.fill(2)
    desk.train(0)
    desk.lease(1, 1)
    before = stage.hook.save()
    stage.boot()
    assert stage.hook.save() == before
    desk.fill(1, 1)
    (group,) = desk.fill(1, 1)
    assert group == "hook/4"
    assert stage.hook.given == 5


def test_what_was_not_committed_is_given_again(stage: Stage) -> None:
    desk = stage.desk
    perform = desk.perform
    desk.perform = lambda effects: None  # killed before the transaction
    desk.send("w", m.Lease(want=2, wait_s=0.0, lineage="L", serving=0))
    assert stage.hook.given == 2
    desk.perform = perform
    stage.boot()
    assert [group.group for group in desk.lease(2)] == ["hook/0", "hook/1"]


def test_a_rewind_tells_each_attempt_once(stage: Stage) -> None:
    desk = stage.desk
    desk.fill(2)
    desk.train(0)
    assert desk.ask("t", m.Resume(step=0, version=0, lineage="L2")) == m.Ok()
    desk.publish(0, "L2")
    assert desk.batch(0) == ["hook/0", "hook/1"]
    desk.publish(1, "L2")
    assert desk.ask("t", m.Commit(step=0, checkpoint=1)) == m.Ok()
    assert stage.outcomes == [["hook/0", 1, "trained"], ["hook/1", 2, "trained"]]


def test_a_source_that_fails_makes_the_run_wait_and_is_asked_again(stage: Stage) -> None:
    desk = stage.desk
    stage.hook.fails = True
    lease = desk.send("w", m.Lease(want=1, wait_s=60.0, lineage="L", serving=0))
    batch = desk.send("t", m.Batch(step=0, wait_s=60.0))
    for _ in range(3):
        desk.pass_time(0.2)
    assert desk.status["counted"]["prompt source failed"] == 1, "it rests a second"
    assert "source hook hook.py:Hook: take failed: ValueError: no luck" in " ".join(desk.status["waiting"])
    assert desk.status["source"]["failures"] == 1
    desk.pass_time(1.1)
    assert desk.status["counted"]["prompt source failed"] == 2
    stage.hook.fails = False
    desk.pass_time(1.1)
    assert [group.group for group in desk.answers[lease].groups] == ["hook/0"]
    assert batch not in desk.answers
    assert "problem" not in desk.status["source"]


def test_a_source_that_has_nothing_is_asked_again_after_feedback(stage: Stage) -> None:
    desk = stage.desk
    stage.hook.limit = 2
    groups = desk.lease(3)
    assert len(groups) == 2
    batch = desk.send("t", m.Batch(step=0, wait_s=60.0))
    _give_back(desk, groups[0], "drop", "filtered")
    assert batch not in desk.answers, "one is leased, so it may still have something"
    stage.hook.limit = 5
    lease = desk.send("w", m.Lease(want=2, wait_s=60.0, lineage="L", serving=0))
    assert [group.group for group in desk.answers[lease].groups] == ["hook/2", "hook/3"]


def test_the_run_ends_when_nothing_is_left_and_the_source_has_nothing(stage: Stage) -> None:
    desk = stage.desk
    stage.hook.limit = 1
    (group,) = desk.lease(2)
    batch = desk.send("t", m.Batch(step=0, wait_s=60.0))
    desk.put(group)
    desk.lease(1)
    assert desk.answers[batch].code == "source_ended"
    assert stage.outcomes == [["hook/0", 1, "dropped"]]


def test_pushed_prompts_are_not_told(stage: Stage) -> None:
    desk = stage.desk
    desk.join("c", "client")
    desk.ask("c", m.Push(key="k"), bulk=[msgspec.msgpack.encode({"prompt": "a"})])
    groups = desk.lease(2)
    assert [group.group for group in groups] == ["push/0", "hook/0"]
    for group in groups:
        _give_back(desk, group, "drop", "x")
    assert stage.outcomes == [["hook/0", 2, "dropped"]]


def test_another_source_is_refused(stage: Stage) -> None:
    stage.desk.lease(1)
    stage.desk.source = HookSource("other.py:Hook", NumberedHook())
    with pytest.raises(Exception, match=r"it was source hook hook.py:Hook, it is source hook other.py:Hook"):
        stage.desk.restart()
