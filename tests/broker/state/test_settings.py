"""Settings changed while the run goes on: the bound holds through the change, and the change outlives the broker."""

import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from broker.state.rules import Rules
from broker.state.settings import RULES, SETTINGS, current_values
from slimebus.bus import messages as m


def change(desk: Any, key: str = "", **settings: Any) -> Any:
    return desk.ask("op", m.Set(key=key or f"k{desk.request}", settings=settings), run="")


def test_a_change_says_old_and_new_and_the_first_step_that_it_holds_for(desk: Any) -> None:
    desk.fill(2)
    desk.batch(0)
    reply = change(desk, max_staleness=4, rollout_batch_size=2)
    assert reply.changed == {"max_staleness": (1, 4.0)}, "the batch size was 2 already"
    assert (reply.step, reply.settings["max_staleness"], reply.settings["rollout_batch_size"]) == (1, 4.0, 2)
    assert desk.status["settings"]["max_staleness"] == 4
    assert desk.status["changes"] == [{"step": 1, "by": "op", "text": "max_staleness from 1 to 4, from step 1 on"}]


def test_asking_for_nothing_shows_every_setting(desk: Any) -> None:
    reply = change(desk)
    assert reply.changed == {}
    assert reply.settings.keys() == SETTINGS.keys()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"colour": "red"}, "'colour' cannot be changed while the run goes on; what can: max_staleness"),
        ({"weights.max_staleness": 1}, "'weights.max_staleness' cannot be changed"),
        ({"max_staleness": "many"}, "expected a number"),
        ({"max_staleness": 1.5}, "expected a whole number of versions"),
        ({"max_staleness": 1e308}, "expected a whole number of versions"),
        ({"max_staleness": -1}, "expected a number >= 0"),
        ({"rollout_batch_size": 2.5}, "expected a whole number"),
        ({"rollout_batch_size": True}, "expected a whole number"),
        ({"rollout_batch_size": math.inf}, "expected a whole number"),
        ({"rollout_batch_size": 0}, "set: rollout_batch_size is 0; expected a whole number >= 1"),
        ({"max_staleness": 3, "broker.max_staleness": 4}, "is given twice"),
        ({"batch_tokens": 1e300}, "expected a whole number >= 0 and <= 1099511627776"),
        ({"max_stalenes": 3}, "did you mean max_staleness?"),
        ({"over_sampling_batch_size": 1}, "over_sampling_batch_size 1 is below the batch of 2 groups"),
        ({"on_stale": "burn"}, "expected one of requeue, drop"),
        ({"buffer_capacity": 1}, "no batch would ever fill"),
        ({"lease_s": 0.5}, "every lease expires"),
        ({"max_staleness": 3, "n_samples_per_prompt": 0}, "expected a whole number >= 1"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(desk: Any, settings: dict[str, Any], text: str) -> None:
    before = desk.state.rules
    for _ in range(2):
        refused = change(desk, "a key", **settings)
        assert refused.code == "config"
        assert text in refused.text
    assert desk.state.rules == before
    assert desk.status["changes"] == []


def test_a_worker_may_not_change_settings(desk: Any) -> None:
    assert desk.ask("w", m.Set(key="k", settings={"max_staleness": 9})).code == "role"


def test_a_repeated_change_gets_the_first_answer_and_does_not_undo_a_later_one(desk: Any) -> None:
    first = change(desk, "a", max_staleness=4)
    change(desk, "b", max_staleness=2)
    again = change(desk, "a", max_staleness=4)
    assert again.changed == first.changed
    assert desk.state.rules.max_staleness == 2


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.sampled_from(["drop", "wait", "", "x" * 100])
)


def test_a_change_repeated_after_many_others_and_a_restart_is_not_put_in_force_again(desk: Any) -> None:
    desk.join("c", "client")
    first = desk.ask("c", m.Set(key="first", settings={"max_attempts": 7}))
    for number in range(100):
        desk.ask("c", m.Set(key=f"later {number}", settings={"max_attempts": 8 + number}))
    desk.restart()
    desk.join("c", "client")
    again = desk.ask("c", m.Set(key="first", settings={"max_attempts": 7}))
    assert (again.step, again.changed) == (first.step, first.changed)
    assert desk.state.rules.max_attempts == 107
    assert len(desk.status["changes"]) == 32


@hypothesis_settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.dictionaries(st.sampled_from([*SETTINGS, "broker.max_staleness", "colour"]), VALUES, max_size=3), max_size=4))
def test_whatever_is_asked_for_is_answered_and_the_broker_starts_again(begun_desk: Any, asked: list[dict[str, Any]]) -> None:
    desk = begun_desk()
    for settings in asked:
        before = desk.state.rules
        reply = change(desk, **settings)
        assert isinstance(reply, m.SetReply) or (reply.code == "config" and desk.state.rules == before)
        held = desk.state.rules
        desk.restart()
        assert desk.state.rules == held
        assert "max_staleness" in desk.status["settings"]


# --- the bound ---


def test_raising_the_bound_answers_a_parked_lease_at_once(desk: Any) -> None:
    desk.fill(4)
    number = desk.send("w", m.Lease(want=9, wait_s=30.0, lineage="L", serving=0))
    assert number not in desk.answers
    change(desk, max_staleness=2)
    assert len(desk.answers[number].groups) == 2


def test_lowering_the_bound_requeues_what_became_too_old_and_hands_out_nothing_staler(begun_desk: Any) -> None:
    desk = begun_desk(max_staleness=3)
    desk.fill(8)
    desk.train(0)
    desk.train(1)
    change(desk, max_staleness=1)
    assert desk.status["groups"]["ready"] == 0, "made by version 0; step 2 trains version 2"
    assert desk.status["groups"]["queued"] == 4
    assert desk.batch(2) == []
    desk.fill(2, version=2)
    assert len(desk.batch(2)) == 2


def test_a_batch_that_is_chosen_keeps_its_groups_and_names_its_own_bound(begun_desk: Any) -> None:
    desk = begun_desk(max_staleness=3)
    desk.fill(8)
    desk.train(0)
    desk.train(1)
    chosen = desk.batch(2)
    change(desk, max_staleness=0)
    desk.restart()
    reply = desk.ask("t", m.Batch(step=2, wait_s=0.0))
    assert ([g.group for g in reply.groups], reply.max_staleness) == (chosen, 3)
    desk.publish(3)
    desk.ask("t", m.Commit(step=2))
    desk.fill(2, version=3)
    assert desk.ask("t", m.Batch(step=3, wait_s=0.0)).max_staleness == 0


def test_an_unbounded_run_names_no_bound_and_says_so(desk: Any) -> None:
    assert change(desk, max_staleness=math.inf).changed == {"max_staleness": (1, math.inf)}
    assert desk.status["settings"]["max_staleness"] == "unbounded"
    desk.fill(2)
    assert desk.ask("t", m.Batch(step=0, wait_s=0.0)).max_staleness is None


# --- sizes ---


def test_a_batch_size_holds_from_the_first_step_that_is_not_chosen(desk: Any) -> None:
    desk.fill(4)
    assert len(desk.batch(0)) == 2
    change(desk, rollout_batch_size=3)
    assert len(desk.batch(0)) == 2
    assert desk.batch(1) == []
    desk.train(0)
    desk.fill(1, version=1)
    assert len(desk.batch(1)) == 3


def test_a_smaller_batch_is_handed_out_at_once(desk: Any) -> None:
    number = desk.send("t", m.Batch(step=0, wait_s=30.0))
    desk.fill(1)
    change(desk, rollout_batch_size=1)
    assert len(desk.answers[number].groups) == 1


def test_a_group_size_holds_for_new_leases_and_a_repeated_request_gets_the_first_answer(desk: Any) -> None:
    number = desk.send("w", m.Lease(want=1, wait_s=0.0, lineage="L", serving=0))
    change(desk, n_samples_per_prompt=5)
    assert [g.num_samples for g in desk.ask("w", m.Lease(want=1, wait_s=0.0, lineage="L", serving=0), request=number).groups] == [1]
    assert [g.num_samples for g in desk.lease(1)] == [5]


def test_automatic_room_grows_with_the_bound(begun_desk: Any) -> None:
    desk = begun_desk(buffer_capacity=0, max_staleness=0)
    assert desk.state.rules.capacity == 6
    change(desk, max_staleness=8)
    assert len(desk.lease(99)) == 18


# --- the pace of versions ---


def test_a_new_publish_interval_goes_on_from_the_version_of_the_first_open_step(desk: Any) -> None:
    for step in range(3):
        desk.fill(2, version=step)
        desk.train(step)
    desk.fill(2, version=3)
    reply = desk.ask("t", m.Batch(step=3, wait_s=0.0))
    assert (reply.version, reply.next_version) == (3, 4)
    change(desk, update_weights_interval=2)
    assert desk.ask("t", m.Batch(step=3, wait_s=0.0)).next_version == 4, "the trainer was told to publish 4 after step 3"
    assert [desk.state.version_of(step) for step in range(3, 10)] == [3, 4, 4, 5, 5, 6, 6]
    desk.restart()
    assert [desk.state.version_of(step) for step in range(3, 10)] == [3, 4, 4, 5, 5, 6, 6]
    assert desk.ask("t", m.Resume(step=0, version=0, lineage="L")) == m.Ok(), "a repeat of the first resume changes nothing"
    assert desk.state.version_of(4) == 4


@hypothesis_settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=6), st.booleans())
def test_versions_rise_by_at_most_one_a_step_whatever_the_pace_and_are_what_the_trainer_was_told(
    begun_desk: Any, paces: list[tuple[int, int]], restarts: bool
) -> None:
    desk = begun_desk(max_staleness=math.inf, prompts=1000)
    step, promised = 0, 0
    for interval, steps in paces:
        change(desk, update_weights_interval=interval)
        for _ in range(steps):
            desk.fill(2)
            reply = desk.ask("t", m.Batch(step=step, wait_s=0.0))
            assert reply.version == promised
            assert 0 <= reply.next_version - reply.version <= 1
            promised = reply.next_version
            if restarts:
                desk.restart()
            desk.publish(promised)
            assert desk.ask("t", m.Commit(step=step, checkpoint=step + 1)) == m.Ok()
            step += 1


# --- over a restart of the broker ---


def test_a_change_outlives_the_broker(desk: Any) -> None:
    change(desk, max_staleness=4, rollout_batch_size=3)
    desk.restart()
    desk.restart()
    assert (desk.state.rules.max_staleness, desk.state.rules.batch_size) == (4, 3)


def test_a_config_edited_after_the_change_wins_for_that_setting_alone(desk: Any) -> None:
    change(desk, max_staleness=4, rollout_batch_size=3)
    desk.rules = Rules(**{f: getattr(desk.rules, f) for f in desk.rules.__struct_fields__} | {"max_staleness": 2})
    desk.restart()
    assert (desk.state.rules.max_staleness, desk.state.rules.batch_size) == (2, 3)
    desk.restart()
    assert (desk.state.rules.max_staleness, desk.state.rules.batch_size) == (2, 3)


def test_a_change_that_no_longer_fits_the_config_is_let_go_with_a_word(desk: Any) -> None:
    change(desk, lease_s=5)
    desk.rules = Rules(**{f: getattr(desk.rules, f) for f in desk.rules.__struct_fields__} | {"heartbeat_s": 7.0})
    desk.restart()
    assert desk.state.rules.lease_s == 10


def test_a_config_with_another_publish_interval_goes_on_from_the_version_it_was_at(desk: Any) -> None:
    for step in range(3):
        desk.fill(2, version=step)
        desk.train(step)
    desk.rules = Rules(**{f: getattr(desk.rules, f) for f in desk.rules.__struct_fields__} | {"publish_interval": 3})
    desk.restart()
    assert [desk.state.version_of(step) for step in range(3, 10)] == [3, 3, 3, 4, 4, 4, 5]


def test_every_setting_has_its_field_in_the_config_and_in_the_rules() -> None:
    from slimebus.config.schema import paths

    assert RULES.keys() <= paths().keys()
    assert current_values(Rules(batch_size=1)).keys() == SETTINGS.keys()
