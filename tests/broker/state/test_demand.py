"""How many more workers would be busy now."""

from typing import Any

import pytest

from broker.state.rules import EvalDataset
from slimebus import messages as m


def beat(desk: Any, name: str, version: int) -> None:
    held = [g.lease for g in desk.state.groups.leased_by(name)]
    desk.ask(name, m.Heartbeat(state="serving", lineage="L", serving=version, leases=held))


def ask_more(desk: Any, name: str, want: int, version: int) -> None:
    """A worker with room for more, whose request waits."""
    assert desk.ask(name, m.Lease(want=want, wait_s=600.0, lineage="L", serving=version)) is None


def work(desk: Any, name: str, count: int, version: int, seconds: float = 10.0) -> None:
    """A worker makes `count` groups at once in `seconds`."""
    groups = desk.lease(count, version, name=name)
    assert len(groups) == count
    desk.pass_time(seconds)
    for group in groups:
        assert desk.put(group, version, name=name).result == "accepted"


@pytest.fixture
def starving(new_desk: Any) -> Any:
    """8 groups a step, on-policy; w makes 2 at once; the trainer waits for batch 1 and 6 more groups could be leased."""
    desk = new_desk(batch_size=8, max_staleness=0, lease_s=1000.0, client_timeout_s=1000.0)
    desk.begin()
    for _ in range(4):
        work(desk, "w", 2, 0)
    desk.train(0)
    desk.ask("t", m.Batch(step=1, wait_s=600.0))
    assert len(desk.lease(2, 1)) == 2
    return desk


def test_a_starving_trainer_and_free_admission_ask_for_workers(starving: Any) -> None:
    assert starving.status["pace"]["room_groups"] == 6
    assert starving.status["pace"]["groups_per_worker"] == 2
    assert starving.status["demand"] == 3


def test_workers_that_came_are_busy_and_demand_falls_to_nothing(starving: Any) -> None:
    for expected, name in [(2, "v1"), (1, "v2"), (0, "v3")]:
        starving.join(name, "rollout")
        assert starving.status["demand"] == expected, "a worker that still pulls will take its share"
        starving.lease(2, 1, name=name)
        assert starving.status["demand"] == expected


def test_the_bound_holds_workers_back_and_nobody_is_asked_for(starving: Any) -> None:
    assert len(starving.lease(6, 1)) == 6  # takes all that there is
    starving.join("v", "rollout")
    beat(starving, "v", 1)
    ask_more(starving, "v", 4, 1)
    assert starving.status["pace"]["room_groups"] == 0
    assert starving.status["demand"] == 0


def test_a_full_buffer_asks_for_nobody(new_desk: Any) -> None:
    desk = new_desk(batch_size=4, max_staleness=float("inf"), buffer_capacity=8)
    desk.begin()
    assert desk.status["pace"]["room_groups"] == 8
    desk.lease(8, 0)
    assert desk.status["demand"] == 0


def test_room_counts_what_the_bound_allows(new_desk: Any) -> None:
    desk = new_desk(batch_size=4, max_staleness=2, publish_interval=2, num_steps=100)
    desk.begin()
    assert desk.status["pace"]["room_groups"] == 6 * 4
    desk.lease(3, 0)
    assert desk.status["pace"]["room_groups"] == 21
    few = new_desk(batch_size=4, max_staleness=2, num_steps=2)
    few.begin()
    assert few.status["pace"]["room_groups"] == 8


def test_prompts_that_are_used_up_ask_for_nobody(new_desk: Any) -> None:
    desk = new_desk(prompts=3, batch_size=2, max_staleness=4)
    desk.begin()
    desk.lease(3, 0)
    desk.lease(1, 0)
    assert desk.status["demand"] == 0


def test_workers_without_work_for_two_steps_are_too_many(new_desk: Any) -> None:
    desk = new_desk(batch_size=2, max_staleness=0, lease_s=1000.0, client_timeout_s=1000.0)
    desk.begin()
    for name in ("v1", "v2"):
        desk.join(name, "rollout")
    for step in range(4):
        work(desk, "w", 2, step)
        desk.train(step)
        for name in ("w", "v1", "v2"):
            beat(desk, name, step + 1)
        desk.lease(2, step + 1)  # the whole batch is being made
        assert desk.status["demand"] == (-2 if step >= 2 else 0)
        for group in desk.state.groups.leased_by("w"):
            desk.ask("w", m.GiveBack(group=group.id, lease=group.lease, outcome="requeue", reason="test"))


def test_only_present_workers_count(starving: Any) -> None:
    starving.join("v", "rollout")
    beat(starving, "v", 1)
    ask = starving.status["demand"]
    starving.pass_time(990)
    beat(starving, "w", 1)
    starving.pass_time(20)
    assert starving.state.clients["v"].is_gone
    assert starving.status["pace"]["workers"] == 1
    assert starving.status["demand"] == ask == 3


def test_the_trainer_pace_limits_what_a_loose_bound_would_take(new_desk: Any) -> None:
    desk = new_desk(batch_size=4, max_staleness=20, lease_s=1000.0, client_timeout_s=1000.0)
    desk.begin()
    for step in range(6):
        work(desk, "w", 4, step, seconds=30.0)
        desk.ask("t", m.Fetch(groups=desk.batch(step)))
        desk.pass_time(10.0)
        desk.train(step)
    # 4 groups each 10 s, made 4 at once in 30 s: three workers keep up
    desk.lease(4, 6)
    assert desk.status["pace"]["room_groups"] > 60
    assert desk.status["demand"] == 2


def test_without_a_worker_there_is_demand_from_the_start(new_desk: Any) -> None:
    desk = new_desk()
    assert desk.status["demand"] == 1
    desk.join("t", "trainer")
    desk.ask("t", m.Resume(step=0, version=0, lineage="L"))
    desk.publish(0)
    assert desk.status["demand"] == 1
    desk.join("w", "rollout")
    assert desk.status["demand"] >= 0


def test_queued_evaluations_ask_for_workers(new_desk: Any) -> None:
    desk = new_desk(batch_size=2, max_staleness=0, samples_per_prompt=4, eval_datasets={"held": EvalDataset(num_prompts=40, num_samples=2)})
    desk.begin()
    assert desk.status["pace"]["room_groups"] == 2 + 20


def test_a_finished_run_needs_none_of_its_workers(new_desk: Any) -> None:
    desk = new_desk()
    desk.begin()
    desk.ask("t", m.Finish())
    assert desk.status["demand"] == -1
