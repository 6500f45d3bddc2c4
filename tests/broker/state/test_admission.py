"""When a worker may start a group."""

from typing import Any

import pytest

from slimebus.bus import messages as m


@pytest.mark.parametrize(
    ("rules", "count"),
    [
        ({"max_staleness": 1}, 4),  # steps 0 and 1
        ({"max_staleness": 0, "publish_interval": 2}, 4),  # two batches a version
        ({"max_staleness": float("inf"), "num_steps": 3}, 6),  # no more than the run trains
    ],
)
def test_admission_stops_where_a_group_would_grow_too_old_or_the_run_ends(begun_desk: Any, rules: dict[str, Any], count: int) -> None:
    assert len(begun_desk(**rules).lease(99)) == count


def test_staleness_zero_admits_one_batch_a_version(begun_desk: Any) -> None:
    desk = begun_desk(max_staleness=0)
    assert len(desk.fill(99)) == 2
    assert desk.lease(1) == []
    desk.train(0)
    assert desk.lease(1, serving=0) == [], "the worker still serves version 0"
    assert len(desk.lease(99, serving=1)) == 2


def test_an_unbounded_run_is_bounded_by_the_buffer(begun_desk: Any) -> None:
    desk = begun_desk(max_staleness=float("inf"), buffer_capacity=5)
    assert len(desk.fill(99)) == 5
    reply = desk.ask("w", m.Lease(want=1, wait_s=0.0, lineage="L", serving=0))
    assert "the buffer holds 5 of 5 groups" in reply.reason


def test_a_worker_without_verified_weights_of_this_lineage_gets_nothing(desk: Any) -> None:
    for lineage, serving in (("", -1), ("L", -1), ("other", 0)):
        reply = desk.ask("w", m.Lease(want=1, wait_s=0.0, lineage=lineage, serving=serving))
        assert reply.groups == []
        assert "must pull version 0 first" in reply.reason


def test_demonstrations_need_no_weights_and_no_trainer(new_desk: Any) -> None:
    desk = new_desk(buffer_capacity=3)
    desk.join("w", "rollout")
    reply = desk.ask("w", m.Lease(want=9, wait_s=0.0, needs_weights=False))
    assert len(reply.groups) == 3


def test_a_dropped_group_makes_room_for_another(desk: Any) -> None:
    groups = desk.lease(99)
    number = desk.send("w", m.Lease(want=1, wait_s=30.0, lineage="L", serving=0))
    desk.ask("w", m.GiveBack(group=groups[0].group, lease=groups[0].lease, outcome="drop", reason="no spread"))
    assert [g.group for g in desk.answers[number].groups] == ["0/4"]
