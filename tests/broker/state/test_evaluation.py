"""Held-out scores."""

from typing import Any

import pytest

from broker.state import evaluation
from broker.state.records import Tally
from broker.state.rules import HeldOutSet
from slimebus.bus import messages as m

HELD = {"held": HeldOutSet(num_prompts=2, num_samples=3, sampling={"temperature": 0.0})}


def _score(desk: Any, version: int, rewards: tuple[float, ...] = (1.0, 0.0, 1.0)) -> None:
    """Lease, one by one, until both prompts of the held-out set are scored; training groups between are only held."""
    scored = 0
    while scored < 2:
        (group,) = desk.lease(1, serving=version)
        if group.kind == "eval":
            assert desk.put(group, version=version, rewards=rewards).result == "accepted"
            scored += 1


def test_the_first_version_is_evaluated_ahead_of_training(begun_desk: Any) -> None:
    desk = begun_desk(samples_per_prompt=3, eval_datasets=HELD)
    groups = desk.lease(3)
    assert [g.kind for g in groups] == ["eval", "eval", "train"]
    assert (groups[0].dataset, groups[0].num_samples, groups[0].sampling) == ("held", 3, {"temperature": 0.0})
    for group in groups[:2]:
        desk.put(group, rewards=(1.0, 0.0, 1.0))
    (row,) = [r for r in desk.rows if "evaluation" in r]
    assert (row["dataset"], row["version"], row["num_samples"], row["interval"]) == ("held", 0, 6, "wilson")
    assert row["mean_reward"] == pytest.approx(4 / 6)
    assert {k: mean for k, (mean, _, _) in row["pass_at"].items()} == pytest.approx({"1": 2 / 3, "2": 1.0})
    assert desk.status["groups"]["ready"] == 0, "samples of an evaluation are not kept"
    assert len(desk.lease(99)) == 3, "and do not count in admission"


def test_evaluations_that_are_asked_for_do_not_keep_training_from_beginning(begun_desk: Any) -> None:
    desk = begun_desk(samples_per_prompt=3, eval_datasets=HELD, eval_first=False)
    for key in ("a", "b", "c"):
        desk.ask("c", m.Evaluate(key=key, wait_s=0.0), epoch=0)
    kinds = [group.kind for group in desk.lease(4)]
    assert kinds.count("train") >= 2


def test_a_trainer_without_a_batch_is_told_that_workers_sample_an_evaluation(begun_desk: Any) -> None:
    desk = begun_desk(samples_per_prompt=3, eval_datasets=HELD)
    assert [group.kind for group in desk.lease(2)] == ["eval", "eval"]
    waiting = desk.ask("t", m.Batch(step=0, wait_s=0.0))
    assert waiting.reason == "trainer waits for batch 0: 0 of 2 groups ready; none leased; workers sample 2 prompts of an evaluation"


def test_evaluations_come_at_their_interval_and_wait_for_workers_of_that_version(begun_desk: Any) -> None:
    desk = begun_desk(samples_per_prompt=3, eval_datasets=HELD, eval_first=False, eval_interval=2)
    for step in range(2):
        desk.fill(2, version=step)
        desk.train(step)
    assert all(g.kind == "train" for g in desk.lease(1, serving=1))
    _score(desk, 2)
    assert [r["version"] for r in desk.rows if "evaluation" in r] == [2]


def test_an_evaluation_shares_the_workers_with_training_that_has_no_batch_to_spare(begun_desk: Any) -> None:
    sets = {"held": HeldOutSet(num_prompts=20, num_samples=1)}
    desk = begun_desk(samples_per_prompt=4, max_staleness=9, eval_datasets=sets, eval_first=False, eval_interval=1)
    desk.fill(2)
    desk.train(0)
    kinds = [g.kind for g in desk.lease(3, serving=1)]
    assert kinds == ["train", "eval", "eval", "train", "eval", "eval"], "half a sample of an evaluation for each of training"


def test_an_evaluation_takes_what_training_may_not_use(begun_desk: Any) -> None:
    sets = {"held": HeldOutSet(num_prompts=3, num_samples=1)}
    desk = begun_desk(max_staleness=0, eval_datasets=sets, eval_first=False, eval_interval=1)
    desk.fill(2)
    desk.train(0)
    assert [g.kind for g in desk.lease(9, serving=1)] == ["train", "eval", "train", "eval", "eval"]


def test_the_run_finishes_after_the_last_version_is_evaluated(begun_desk: Any) -> None:
    desk = begun_desk(samples_per_prompt=3, eval_datasets=HELD, eval_first=False, num_steps=1)
    desk.fill(2)
    desk.train(0)
    desk.ask("t", m.Finish())
    assert not desk.ask("w", m.Heartbeat(lineage="L", serving=1)).finished
    _score(desk, 1)
    assert desk.ask("w", m.Heartbeat(lineage="L", serving=1)).finished


def test_no_worker_left_ends_the_last_evaluation(begun_desk: Any) -> None:
    desk = begun_desk(samples_per_prompt=3, eval_datasets=HELD)
    desk.ask("w", m.Goodbye())
    desk.ask("t", m.Finish())
    desk.pass_time(21.0)
    assert desk.status["state"] == "finished"
    assert desk.status["evaluations"][0]["reason"] == "no worker is left to evaluate"


def test_an_evaluation_on_request_is_one_for_its_key(begun_desk: Any) -> None:
    desk = begun_desk(samples_per_prompt=3, eval_datasets=HELD, eval_first=False)
    number = desk.send("me", m.Evaluate(key="k", wait_s=60.0))
    assert not desk.ask("me", m.Evaluate(key="k")).done
    _score(desk, 0)
    assert desk.answers[number].done
    assert desk.ask("me", m.Evaluate(key="k")).done
    assert desk.ask("me", m.Evaluate(key="x", datasets=["none"])).code == "no_dataset"


def test_an_evaluation_survives_a_restart_in_the_middle(begun_desk: Any) -> None:
    desk = begun_desk(samples_per_prompt=3, eval_datasets=HELD)
    first, second = desk.lease(2)
    desk.put(first, rewards=(1.0,))
    desk.restart()
    desk.put(second, rewards=(0.0,))
    (row,) = [r for r in desk.rows if "evaluation" in r]
    assert (row["mean_reward"], row["num_samples"]) == (0.5, 6)


def test_a_restart_with_other_held_out_sets_ends_what_cannot_be_scored(new_desk: Any, begun_desk: Any) -> None:
    desk = begun_desk(samples_per_prompt=3, eval_datasets=HELD)
    desk.rules = new_desk(eval_datasets={"other": HeldOutSet(num_prompts=1)}).rules
    desk.restart()
    assert [g.kind for g in desk.lease(1)] == ["train"]
    assert desk.status["evaluations"][0]["reason"] == "the held-out sets changed"


def test_wilsons_interval_is_that_of_the_paper() -> None:
    low, high = Tally(num_prompts=10, num_samples=10, total=8.0, total_squares=8.0).interval_95()
    assert (low, high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))


def test_results_are_kept_for_a_bounded_number_of_evaluations(begun_desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "MAX_DONE", 2)
    desk = begun_desk(prompts=0, samples_per_prompt=3, eval_datasets=HELD, eval_first=False)
    for key in "abc":
        desk.ask("op", m.Evaluate(key=key), run="")
        for group in desk.lease(2):
            desk.put(group, rewards=(1.0, 0.0, 1.0))
    assert list(desk.state.evaluations) == ["b", "c"]
    assert {key for key, _ in desk.store.scan("evaluations")} == {"b", "c"}
    assert not desk.ask("op", m.Evaluate(key="a"), run="").done, "a key whose result is gone begins anew"


def test_versions_that_come_faster_than_their_evaluations_are_skipped_and_counted(begun_desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "MAX_RUNNING", 1)
    desk = begun_desk(samples_per_prompt=3, eval_datasets=HELD, eval_interval=1, max_staleness=4)
    desk.lease(2)
    desk.fill(2)
    desk.train(0)
    assert len(desk.state.evaluations) == 1
    assert desk.status["counted"]["evaluations skipped"] == 1
