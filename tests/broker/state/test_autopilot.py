"""The staleness bound that changes by itself: down when stale samples weigh too little, up when the trainer waits, within its range."""

import math
from typing import Any

import pytest

from broker.state.autopilot import ESS, WINDOW
from slimebus.bus import messages as m


class Pilot:
    """A desk on autopilot; `steps` trains some, each with these metrics."""

    def __init__(self, new_desk: Any, **rules: Any) -> None:
        self.desk = new_desk(prompts=1000, **{"max_staleness": 2, "target_ess": 0.9, "staleness_range": (1, 3)} | rules)
        self.desk.begin()
        self.step, self.lineage = 0, "L"

    @property
    def bound(self) -> float:
        return self.desk.status["settings"]["max_staleness"]  # type: ignore[no-any-return]

    def resume(self, step: int, lineage: str) -> None:
        assert self.desk.ask("t", m.Resume(step=step, version=step, lineage=lineage)) == m.Ok()
        self.desk.publish(step, lineage=lineage)
        self.step, self.lineage = step, lineage

    def steps(self, number: int, **metrics: float) -> None:
        for _ in range(number):
            self.desk.fill(2, version=self.step, lineage=self.lineage)
            assert self.desk.batch(self.step)
            self.desk.publish(self.step + 1, lineage=self.lineage)
            named = {ESS if name == "ess" else name: value for name, value in metrics.items()}
            assert self.desk.ask("t", m.Commit(step=self.step, metrics=named)) == m.Ok()
            self.step += 1


def test_the_bound_is_lowered_when_the_effective_sample_size_falls_below_its_target(new_desk: Any) -> None:
    pilot = Pilot(new_desk)
    pilot.steps(WINDOW - 1, ess=0.8, wait_s=1.0, train_s=1.0)
    assert pilot.bound == 2
    pilot.steps(1, ess=0.8, wait_s=1.0, train_s=1.0)
    assert pilot.bound == 1
    (change,) = pilot.desk.status["changes"]
    assert change["by"] == "autopilot (ESS 0.800 is below 0.9)"
    assert change["text"] == f"max_staleness from 2 to 1, from step {WINDOW} on"
    assert any("autopilot (ESS 0.800 is below 0.9) changed max_staleness" in note for note in pilot.desk.notes)


def test_the_bound_is_raised_when_the_trainer_waits_and_samples_weigh_enough(new_desk: Any) -> None:
    pilot = Pilot(new_desk)
    pilot.steps(WINDOW, ess=0.95, wait_s=0.5, train_s=1.0)
    assert pilot.bound == 3
    assert pilot.desk.status["changes"][0]["by"] == "autopilot (the trainer waited 33%, ESS 0.950)"


@pytest.mark.parametrize(("ess", "wait_s", "kept"), [(0.8, 0.0, 1), (0.95, 9.0, 3)])
def test_the_bound_stays_within_its_range(new_desk: Any, ess: float, wait_s: float, kept: int) -> None:
    pilot = Pilot(new_desk)
    pilot.steps(5 * WINDOW, ess=ess, wait_s=wait_s, train_s=1.0)
    assert pilot.bound == kept


def test_steps_that_were_chosen_under_the_old_bound_do_not_judge_the_new_one(new_desk: Any) -> None:
    pilot = Pilot(new_desk, max_staleness=3)
    pilot.steps(2 * WINDOW - 1, ess=0.5, wait_s=0.0, train_s=1.0)
    assert pilot.bound == 2
    pilot.steps(1, ess=0.5, wait_s=0.0, train_s=1.0)
    assert pilot.bound == 1


def test_steps_without_a_gradient_are_passed_over(new_desk: Any) -> None:
    pilot = Pilot(new_desk)
    for _ in range(WINDOW - 1):
        pilot.steps(1, ess=0.95, wait_s=0.5, train_s=1.0)
        pilot.steps(1, wait_s=0.5, train_s=0.0)
    assert pilot.bound == 2
    pilot.steps(1, ess=0.95, wait_s=0.5, train_s=1.0)
    assert pilot.bound == 3


def test_nothing_changes_while_all_is_well_or_nothing_is_known(new_desk: Any) -> None:
    pilot = Pilot(new_desk)
    pilot.steps(2 * WINDOW, ess=0.95, wait_s=0.01, train_s=1.0)
    pilot.steps(2 * WINDOW, wait_s=5.0, train_s=1.0)
    assert (pilot.bound, pilot.desk.status["changes"]) == (2, [])


def test_without_a_target_the_bound_is_the_users(new_desk: Any) -> None:
    pilot = Pilot(new_desk, target_ess=0.0)
    pilot.steps(2 * WINDOW, ess=0.1, wait_s=5.0, train_s=1.0)
    assert pilot.bound == 2


def test_a_bound_that_it_chose_outlives_the_broker(new_desk: Any) -> None:
    pilot = Pilot(new_desk)
    pilot.steps(WINDOW, ess=0.95, wait_s=0.5, train_s=1.0)
    pilot.desk.restart()
    assert pilot.bound == 3


def test_steps_of_an_abandoned_timeline_do_not_judge_the_bound(new_desk: Any) -> None:
    pilot = Pilot(new_desk, max_staleness=3)
    pilot.steps(WINDOW, ess=0.5, wait_s=0.0, train_s=1.0)
    pilot.steps(WINDOW - 1, ess=0.5, wait_s=0.0, train_s=1.0)
    assert pilot.bound == 2
    pilot.resume(WINDOW - 2, "M")
    pilot.steps(WINDOW - 1, ess=0.5, wait_s=0.0, train_s=1.0)
    assert pilot.bound == 2  # of this timeline, one step too few under the new bound
    assert [row["step"] for row in pilot.desk.status["steps"]] == list(range(2 * WINDOW - 3))
    pilot.steps(1, ess=0.5, wait_s=0.0, train_s=1.0)
    assert pilot.bound == 1  # the change counts from where the timeline was gone back to


def test_the_error_of_the_engine_alone_lowers_no_bound_however_long_samples_are(new_desk: Any) -> None:
    """Logprobs off by a deviation of 0.02, samples of 4,096 tokens: 0.19 of the samples, at every lag."""
    pilot = Pilot(new_desk, max_staleness=3, target_ess=0.95)
    sizes = {"lag/all/ess_sequence": math.exp(-(0.02**2) * 4096), "lag/all/ess_token": math.exp(-(0.02**2))}
    pilot.steps(2 * WINDOW, **sizes, wait_s=0.0, train_s=1.0)
    assert pilot.bound == 3


def test_nobody_sets_a_bound_above_the_ceiling(new_desk: Any) -> None:
    pilot = Pilot(new_desk)
    refused = pilot.desk.ask("op", m.Set(key="k", settings={"max_staleness": 4}), run="")
    assert "max_staleness 4 is outside of staleness_range 1 to 3" in refused.text
    assert pilot.bound == 2
