"""Leases that the broker takes back, and what was sampled with them."""

from typing import Any

from made_samples import frames, made

from slimebus.bus import messages as m


def begun(new_desk: Any, **rules: Any) -> tuple[Any, list[m.LeasedGroup]]:
    """On policy with over-sampling: three groups for a step of two, the first of which is still being sampled when the step is chosen."""
    desk = new_desk(**({"over_sampling": 3, "max_staleness": 0, "masks_offpolicy": True} | rules))
    desk.begin()
    groups = lease(desk, 99)
    for group in groups[1:]:
        desk.put(group)
    assert len(desk.batch(0)) == 2
    return desk, groups


def lease(desk: Any, want: int, serving: int = 0) -> list[m.LeasedGroup]:
    return desk.ask("w", m.Lease(want=want, wait_s=0.0, lineage="L", serving=serving, takes_partials=True)).groups


def beat(desk: Any, *leases: int, serving: int = 0) -> m.HeartbeatReply:
    return desk.ask("w", m.Heartbeat(lineage="L", serving=serving, num_leases=len(leases), lease_sum=sum(leases)))


def give_back(desk: Any, group: m.LeasedGroup, version: int = 0) -> None:
    back = m.GiveBack(group=group.group, lease=group.lease, outcome="partial", reason="recalled", lineage="L")
    assert desk.ask("w", back, bulk=frames(made((version, 3), reward=None, status="aborted"))) == m.Ok()


def commit(desk: Any, step: int) -> None:
    desk.publish(step + 1)
    assert desk.ask("t", m.Commit(step=step)) == m.Ok()


def test_what_a_batch_leaves_behind_is_recalled_and_goes_first_under_the_next_version(new_desk: Any) -> None:
    desk, groups = begun(new_desk)
    assert desk.hints[-1].recalls == 1
    assert beat(desk, groups[0].lease).recalled == [groups[0].lease]
    give_back(desk, groups[0])
    assert beat(desk).recalled == []
    commit(desk, 0)
    again, *others = lease(desk, 99, serving=1)
    assert (again.group, again.partial_frames, again.version) == (groups[0].group, 4, 1)
    tokens = frames(made((0, 3), (1, 2), mask=(0, 0, 0, 1, 1)))
    assert desk.ask("w", m.Put(group=again.group, lease=again.lease, lineage="L"), bulk=tokens).result == "accepted"
    desk.put(others[0], version=1)
    assert desk.batch(1) == [again.group, others[0].group]
    assert desk.status["waste"] == {}


def test_one_hint_tells_of_all_leases_that_are_recalled_together(begun_desk: Any) -> None:
    desk = begun_desk(max_staleness=5, masks_offpolicy=True)
    groups = lease(desk, 12)
    for group in groups[:2]:
        desk.put(group)
    desk.train(0)
    before = len(desk.hints)
    assert desk.ask("operator", m.Set(key="k", settings={"max_staleness": 0.0})).changed
    assert [hint.recalls for hint in desk.hints[before:]] == [10]


def test_without_the_mask_it_is_taken_back_at_once(new_desk: Any) -> None:
    desk, groups = begun(new_desk, masks_offpolicy=False)
    assert (desk.hints[-1].recalls, desk.status["groups"]["leased"]) == (0, 0)
    assert beat(desk, groups[0].lease).list_leases


def test_a_group_that_may_still_be_trained_goes_on_where_it_is(new_desk: Any) -> None:
    desk, groups = begun(new_desk, max_staleness=1)
    assert beat(desk, groups[0].lease).recalled == []


def test_a_recall_that_nobody_answers_ends_the_lease_after_the_lease_time(new_desk: Any) -> None:
    desk, groups = begun(new_desk)
    for _ in range(9):
        desk.pass_time(1.0)
        assert beat(desk, groups[0].lease).recalled == [groups[0].lease]
    desk.pass_time(1.5)
    assert desk.status["moves"]["leased>queued recalled and not given back"] == 1
    told = desk.ask("w", m.Heartbeat(lineage="L", serving=0, leases=[groups[0].lease]))
    assert (told.surplus, told.recalled) == ([groups[0].lease], [])


def test_a_recall_survives_a_restart_with_its_deadline(new_desk: Any) -> None:
    desk, groups = begun(new_desk)
    desk.restart()
    assert beat(desk, groups[0].lease).recalled == [groups[0].lease]
    for _ in range(11):
        desk.pass_time(1.0)
        beat(desk, groups[0].lease)
    assert desk.status["groups"]["leased"] == 0


def test_a_put_that_crosses_the_recall_is_taken_and_counted_as_what_it_is(new_desk: Any) -> None:
    desk, groups = begun(new_desk)
    assert desk.put(groups[0]).result == "accepted"
    assert desk.status["waste"]["stale"]["groups"] == 1
    assert not [key for key in desk.state.timers._deadline if key[0] == "recalled lease"]


def test_a_partial_is_continued_however_old_it_is_and_again_after_a_second_recall(new_desk: Any) -> None:
    desk, groups = begun(new_desk)
    give_back(desk, groups[0])
    commit(desk, 0)
    for step in (1, 2):
        first, *others = lease(desk, 99, serving=step)
        assert (first.group, first.partial_frames) == (groups[0].group, 4)
        for group in others:
            desk.put(group, version=step)
        assert len(desk.batch(step)) == 2
        assert beat(desk, first.lease, serving=step).recalled == [first.lease]
        give_back(desk, first, version=step)
        commit(desk, step)
    assert desk.status["counted"]["leases recalled"] == 3
    assert desk.status["waste"] == {}
