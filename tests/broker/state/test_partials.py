"""What a leaving worker had made of a group, and who gets it."""

from typing import Any

from made_samples import frames, made

from slimebus.bus import messages as m


def partial(group: m.LeasedGroup, lineage: str = "L") -> m.GiveBack:
    return m.GiveBack(group=group.group, lease=group.lease, outcome="partial", reason="worker left", lineage=lineage)


def cut(version: int = 0) -> list[bytes]:
    return frames(made((version, 3), reward=None, status="aborted"))


def lease(desk: Any, name: str = "w", serving: int = 0, *, takes_partials: bool = True) -> list[m.LeasedGroup]:
    ask = m.Lease(want=1, wait_s=0.0, lineage="L", serving=serving, takes_partials=takes_partials)
    return desk.ask(name, ask).groups


def stored(desk: Any) -> list[str]:
    return [key for key, _ in desk.store.scan("partials")]


def test_a_partial_goes_with_its_group_to_the_next_worker_and_ends_with_its_put(desk: Any) -> None:
    desk.join("w2", "rollout")
    (group,) = lease(desk)
    assert desk.ask("w", partial(group), bulk=cut()) == m.Ok()
    (again,) = lease(desk, "w2")
    assert (again.group, again.lease, again.partial_frames) == (group.group, 2, 4)
    assert desk.put(again, name="w2").result == "accepted"
    assert stored(desk) == []
    assert desk.status["waste"] == {}
    assert desk.status["counted"]["partials continued"] == 1


def test_a_partial_outlives_the_lease_of_whoever_continues_it_and_a_restart(desk: Any) -> None:
    (group,) = lease(desk)
    desk.ask("w", partial(group), bulk=cut())
    lease(desk)
    desk.pass_time(10.5)
    desk.restart()
    (again,) = lease(desk)
    assert (again.group, again.partial_frames) == (group.group, 4)


def test_a_partial_given_back_twice_is_kept_once(desk: Any) -> None:
    (group,) = lease(desk)
    for _ in range(2):
        assert desk.ask("w", partial(group), bulk=cut()) == m.Ok()
    assert desk.status["groups"]["queued"] == 1
    assert desk.status["counted"]["partials kept"] == 1


def test_a_worker_that_continues_none_starts_from_the_prompt(desk: Any) -> None:
    (group,) = lease(desk)
    desk.ask("w", partial(group), bulk=cut())
    (again,) = lease(desk, takes_partials=False)
    assert again.partial_frames == 0
    assert desk.status["waste"] == {"partial for a worker that continues none": {"groups": 0, "tokens": 3}}


def test_a_partial_too_stale_to_be_trained_is_not_continued(desk: Any) -> None:
    (group,) = lease(desk)
    for step in range(2):
        desk.fill(2, version=step)
        if step == 0:
            desk.ask("w", partial(group), bulk=cut())
            desk.lease(1, 0)  # takes the partial's group along, so that the fill below gets fresh ones
        desk.train(step)
    held = desk.state.groups.leased_by("w")[0]
    desk.ask("w", m.GiveBack(group=held.id, lease=held.lease.id, outcome="requeue", reason="again"))
    (again,) = lease(desk, serving=2)
    assert (again.group, again.partial_frames) == (group.group, 0)
    assert stored(desk) == []


def test_a_partial_of_an_abandoned_timeline_is_let_go(desk: Any) -> None:
    desk.fill(2)
    desk.train(0)
    (group,) = lease(desk, serving=1)
    desk.ask("w", partial(group), bulk=cut(1))
    assert desk.ask("t", m.Resume(step=0, version=0, lineage="M")) == m.Ok()
    assert stored(desk) == []
    assert desk.status["waste"]["partial of the abandoned timeline"] == {"groups": 0, "tokens": 3}


def test_a_partial_of_a_dropped_group_is_let_go(desk: Any) -> None:
    (group,) = lease(desk)
    desk.ask("w", partial(group), bulk=cut())
    (again,) = lease(desk)
    desk.ask("w", m.GiveBack(group=again.group, lease=again.lease, outcome="drop", reason="filtered"))
    assert stored(desk) == []


def test_a_partial_that_nobody_can_read_is_a_failed_attempt(desk: Any) -> None:
    (group,) = lease(desk)
    assert desk.ask("w", partial(group), bulk=cut()[:-1]) == m.Ok()
    assert (stored(desk), desk.state.groups.by_id[group.group].failures) == ([], 1)
    assert any("partial of group 0/0 by w: 2 bulk frames behind the first for 3 fields" in note for note in desk.notes)


def test_a_partial_of_a_version_never_published_is_not_kept(desk: Any) -> None:
    (group,) = lease(desk)
    assert desk.ask("w", partial(group), bulk=cut(version=3)) == m.Ok()
    assert stored(desk) == []
