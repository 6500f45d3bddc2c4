"""The table of what becomes of a group, row by row."""

import operator
from typing import Any, get_args

import pytest

from broker.state import transitions
from broker.state.broker_state import BrokenState
from broker.state.groups import Phase
from slimebus.bus import messages as m
from slimebus.bus.errors import SlimebusError


def test_a_cause_that_a_phase_does_not_know_is_an_error_with_a_code(desk: Any) -> None:
    desk.fill(1)
    group = desk.state.groups.by_id["0/0"]
    for cause in {cause for _, cause in transitions.TRANSITIONS} - {cause for phase, cause in transitions.TRANSITIONS if phase == "ready"}:
        with pytest.raises(
            SlimebusError, match=f"group 0/0: ready knows no '{cause}'; this process saw queued at .*, leased at .*, ready at"
        ) as refused:
            transitions.apply_transition(desk.state, group, cause)
        assert refused.value.code == "illegal_transition"
    assert group.phase == "ready"


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ("groups.counts", "counted"),
        ("groups.by_lease", "leases by number"),
        ("groups.by_worker", "leases by worker"),
        ("groups.by_read_position", "consumers find"),
        ("groups.ready", "ready groups"),
        ("leases.held_since", "times without a lease"),
        ("steps", "assigned groups and steps"),
        ("clients", "who are no clients"),
        ("timers._deadline", "timers are lacking"),
    ],
)
def test_tables_that_disagree_are_found(desk: Any, table: str, problem: str) -> None:
    desk.fill(3)
    assert desk.batch(0)
    assert desk.lease()
    desk.state.validate()
    operator.attrgetter(table)(desk.state).clear()
    with pytest.raises(BrokenState, match=problem):
        desk.state.validate()


def test_nothing_comes_after_the_end_and_samples_are_kept_only_where_there_are_some() -> None:
    assert {phase for phase, _ in transitions.TRANSITIONS} == set(get_args(Phase)) - {"dropped", "dead"}
    for (phase, cause), transition in transitions.TRANSITIONS.items():
        assert transition.keeps_samples <= (phase in ("ready", "assigned", "committed") or cause == "put"), (phase, cause)


def test_a_prompt_whose_worker_is_lost_each_time_is_dead_in_the_end(begun_desk: Any) -> None:
    desk = begun_desk(max_attempts=2)
    for instance in range(2, 8):
        (group,) = desk.lease()
        assert group.group == "0/0"
        desk.join("w", "rollout", instance=str(instance))
    assert desk.state.meta.ended == {"dead": 1}
    assert "its worker was restarted (6 times in a row)" in desk.notes[-1] + desk.notes[-2] + desk.notes[-3]


@pytest.mark.parametrize("order", ["hello", "expiry, then hello", "broker restart, then hello", "expiry of a lease that it never spoke of"])
def test_the_leases_of_a_worker_that_is_restarted_do_not_count_as_failed_attempts(begun_desk: Any, order: str) -> None:
    desk = begun_desk(max_attempts=1)
    (group,) = desk.lease()
    if "never" not in order:
        desk.ask("w", m.Heartbeat(lineage="L", serving=0, num_leases=1, lease_sum=group.lease))
    if "expiry" in order:
        desk.pass_time(11.0)
    if "broker" in order:
        desk.restart()
    desk.join("w", "rollout", instance="2")
    desk.ask("w", m.Heartbeat())
    found = desk.state.groups.by_id[group.group]
    assert (found.phase, found.failures) == ("queued", 0)
    assert desk.lease()[0].group == group.group, "at once"


def test_a_put_ends_the_suspicion_that_lost_workers_raised(begun_desk: Any) -> None:
    desk = begun_desk(max_attempts=1, max_staleness=0, batch_size=1)
    for instance in ("2", "3"):
        desk.lease()
        desk.join("w", "rollout", instance=instance)
    desk.put(desk.lease()[0])
    assert desk.state.groups.by_id["0/0"].losses == 0


def test_a_prompt_that_kills_its_workers_does_not_take_those_leased_beside_it_along(begun_desk: Any) -> None:
    """One worker, as many groups as it can hold, and one of them kills it whenever it is worked on."""
    desk = begun_desk(max_attempts=2, max_staleness=float("inf"), buffer_capacity=8, batch_size=4)
    poison, done = "0/2", []
    for instance in range(2, 60):
        groups = [group for _ in range(4) for group in desk.lease(1)]
        if poison in [g.group for g in groups]:
            desk.join("w", "rollout", instance=str(instance))
            continue
        for group in groups:
            desk.put(group)
            done.append(group.group)
        while desk.state.groups.count("ready") >= 4:
            desk.train(desk.state.meta.next_step)
    assert desk.state.meta.ended == {"dead": 1}
    assert desk.store.get("ended", poison) is not None
    assert {"0/0", "0/1", "0/3"} <= set(done)


@pytest.mark.parametrize("max_attempts", [1, 3])
def test_a_prompt_that_is_too_stale_each_time_it_is_done_is_dead_in_the_end(begun_desk: Any, max_attempts: int) -> None:
    desk = begun_desk(max_staleness=0, max_attempts=max_attempts, over_sampling=3, prompts=1000)
    for step in range(3 * max_attempts):
        slow, *others = desk.lease(3, serving=step)
        assert slow.group == "0/0", "the first of the queue again"
        for group in others:
            desk.put(group, version=step)
        desk.train(step)
        desk.put(slow, version=step)
    assert desk.state.meta.ended == {"dead": 1}
    assert f"({3 * max_attempts} times)" in next(note for note in desk.notes if "0/0 is dead" in note)


@pytest.mark.parametrize("version", [0, 2])
def test_a_put_of_another_lineage_ends_its_lease_and_counts_as_a_failed_attempt(desk: Any, version: int) -> None:
    (group,) = desk.lease()
    assert (group.lineage, group.version) == ("L", 0), "the lease names what the put must"
    assert desk.put(group, lineage="M", version=version).result == "discarded"
    found = desk.state.groups.by_id[group.group]
    assert (found.phase, found.failures) == ("queued", 1)
    assert desk.status["waste"] == {"put of another lineage": {"groups": 1, "tokens": 4}}
    assert desk.put(group, lineage="M").result == "discarded", "and a repeat is counted once"
    assert desk.status["waste"] == {"put of another lineage": {"groups": 1, "tokens": 4}}
