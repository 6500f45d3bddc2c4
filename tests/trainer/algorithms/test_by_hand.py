"""What each algorithm does that GRPO does not, against numbers worked out by hand, and what it refuses."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from loss_rows import batch_of, gradient, in_order, row_of

from slimebus.config import resolve
from trainer.algorithms.dapo import overlong_punishment
from trainer.algorithms.rloo import leave_one_out
from trainer.batches.batch import Column
from trainer.objective.build_objective import algorithm_problems, build_objective
from trainer.objective.group_rewards import grpo_advantages
from trainer.objective.objective import Objective


def objective(name: str, **flags: Any) -> Objective:
    return build_objective(resolve(None, {"algorithm.advantage_estimator": name, **flags}, environ={}).config)


def problems(name: str, **flags: Any) -> str:
    return "\n".join(algorithm_problems(resolve(None, {"algorithm.advantage_estimator": name, **flags}, environ={})))


def test_one_right_of_four_by_hand() -> None:
    # mean 1/4, population variance 3/16, std 0.4330127
    got = grpo_advantages(np.array([1.0, 0.0, 0.0, 0.0]))
    assert got == pytest.approx([0.75 / 0.4331127, *[-0.25 / 0.4331127] * 3])


def test_without_std_only_the_mean_is_subtracted() -> None:
    assert grpo_advantages(np.array([2.0, 0.0]), std_normalization=False) == pytest.approx([1.0, -1.0])


@pytest.mark.parametrize("rewards", [[0.1] * 7, [1.0], [], [0.0, 0.0]])
def test_equal_rewards_give_exactly_zero(rewards: list[float]) -> None:
    assert not grpo_advantages(np.array(rewards)).any()


@pytest.mark.parametrize("size", [2, 3, 8])
def test_advantages_of_any_group_size_sum_to_zero(size: int) -> None:
    got = grpo_advantages(np.arange(size, dtype=float) ** 2)
    assert got.sum() == pytest.approx(0.0, abs=1e-5)
    assert got.std() == pytest.approx(1.0, rel=1e-3)


def test_samples_of_one_trajectory_count_as_one_in_mean_and_deviation_by_hand() -> None:
    # one attempt in three turns, rewarded 1, and one in a single turn, rewarded 0: mean 1/2, std 1/2
    got = grpo_advantages(np.array([1.0, 1.0, 1.0, 0.0]), np.array([1 / 3, 1 / 3, 1 / 3, 1.0]))
    assert got == pytest.approx([*[0.5 / 0.5001] * 3, -0.5 / 0.5001])


def test_a_reward_is_compared_with_the_others() -> None:
    assert leave_one_out(np.array([1.0, 0.0, 0.0, 0.0]), np.arange(4)) == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])
    # an attempt of two samples, rewarded 1, and attempts rewarded 0.5 and 0
    assert leave_one_out(np.array([1.0, 1.0, 0.5, 0.0]), np.array([0, 0, 1, 2])) == pytest.approx([0.75, 0.75, 0.0, -0.75])
    assert not leave_one_out(np.array([3.0]), np.zeros(1)).any()
    assert not leave_one_out(np.array([3.0, 3.0]), np.zeros(2)).any()


def test_samples_of_a_trajectory_with_rewards_of_their_own_are_compared_with_the_other_trajectories() -> None:
    assert leave_one_out(np.array([1.0, 0.0, 0.0]), np.array([0, 0, 1])) == pytest.approx([1.0, 0.0, -0.5])
    batch = batch_of([1] * 6, groups=[0, 0, 0, 1, 1, 1], reward=[1.0, 0.0, 0.0, 4.0, 2.0, 0.0], trajectory=[0, 0, 1, 0, 1, 1])
    got = objective("rloo").algorithm.advantages(batch)[1::2]
    assert got == pytest.approx([1.0, 0.0, -0.5, 3.0, -2.0, -4.0])


def test_answers_near_the_limit_are_punished() -> None:
    assert overlong_punishment(np.array([0.0, 4.0, 5.0, 8.0, 9.0]), 8, 4) == pytest.approx([0, 0, -0.25, -1, -1])
    assert not overlong_punishment(np.array([8.0]), 8, 0).any()


def test_an_answer_is_as_long_as_what_the_policy_wrote_of_it_in_all_samples_of_its_trajectory() -> None:
    """Tokens that are too old to be trained are masked, and an agent that compacts its history has a sample for each context."""
    flags = {"algorithm.settings.overlong_buffer_len": 20, "rollout.rollout_max_response_len": 100}
    batch = batch_of([100, 50, 50, 30], reward=[1.0] * 4, trajectory=[0, 1, 1, 2])
    written = np.where(batch["loss_mask"] > 0, 3, -1)
    written[batch.starts[3] + 1 : batch.starts[3] + 11] = -1  # a tool's answer
    masked = batch["loss_mask"].copy()
    masked[:80] = 0
    batch = batch.with_columns({"versions": written, "loss_mask": masked})
    assert objective("dapo", **flags).algorithm.rewards(batch) == pytest.approx([0, 0, 0, 1])  # type: ignore[attr-defined]


def test_gspo_clips_all_tokens_of_a_sequence_that_strays_a_thousandth() -> None:
    paper = {"algorithm.settings.eps_clip": 3e-4, "algorithm.settings.eps_clip_high": 4e-4}
    row = row_of(batch_of([2, 2]), [0.001, 0.001, 0.0003, 0.0003])
    outcome = objective("gspo", **paper).loss(row)
    outcome.loss.sum().backward()
    assert in_order(row, outcome.measures["pg_clipfrac"]) == [1, 1, 0, 0]
    assert gradient(row) == pytest.approx([0, 0, -math.exp(0.0003), -math.exp(0.0003)])


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_gspo_trains_samples_whose_engine_is_off_by_half_a_thousandth_of_a_nat(advantage: float) -> None:
    row = row_of(batch_of([100], advantages=advantage), [-5e-4] * 100)
    outcome = objective("gspo").loss(row)
    outcome.loss.sum().backward()
    assert not outcome.measures["pg_clipfrac"].any()
    assert gradient(row) == pytest.approx([-advantage] * 100, rel=1e-3)


def test_the_teachers_verdict_is_minus_the_reverse_kl() -> None:
    batch = batch_of([2], reward=[1.0], rollout_logprobs=[math.log(0.5), math.log(0.2)], teacher_logprobs=[math.log(0.25), math.log(0.4)])
    chosen = objective("on_policy_distillation")
    assert chosen.fields == {"teacher_logprobs"}
    got = chosen.algorithm.advantages(batch)
    assert got[1:] == pytest.approx([-math.log(2), math.log(2)])
    assert objective("on_policy_distillation", **{"algorithm.use_rollout_logprobs": False}).needs_pass("old_logprobs")


def test_over_the_students_own_tokens_the_gradient_is_that_of_the_reverse_kl() -> None:
    logits = torch.tensor([0.3, -0.2, 0.7], dtype=torch.float64, requires_grad=True)
    student, teacher = logits.log_softmax(0), torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64).log()
    batch = batch_of([1, 1, 1], reward=[0.0] * 3, rollout_logprobs=student.detach().numpy(), teacher_logprobs=teacher.numpy())
    chosen = objective("on_policy_distillation")
    batch = batch.with_columns({"advantages": chosen.algorithm.advantages(batch).astype(np.float32)})
    row = row_of(batch, student.tolist())
    chosen.loss(row).loss.sum().backward()
    share = student.exp().detach()  # how often each token is sampled
    (got,) = torch.autograd.grad((share * torch.tensor(gradient(row)) * student).sum(), logits, retain_graph=True)
    (wanted,) = torch.autograd.grad((student.exp() * (student - teacher)).sum(), logits)
    assert got.tolist() == pytest.approx(wanted.tolist(), abs=1e-6)


def test_advantages_come_one_a_token_or_one_a_sample() -> None:
    chosen, batch = objective("precomputed", **{"rollout.n_samples_per_prompt": 1}), batch_of([2, 1])
    assert chosen.fields == {"advantages"}
    for_samples = batch.with_columns({"advantages": Column(np.array([0.5, -2.0]), "sample")})
    assert chosen.advantages(for_samples)["advantages"].values.tolist() == [0, 0.5, 0.5, 0, -2]


@pytest.mark.parametrize(("version", "lag", "rests"), [(0, 0, True), (1, 3, True), (3, 2, False), (-1, 0, True)])
def test_the_policy_rests_while_only_the_critic_learns(version: int, lag: int, rests: bool) -> None:
    flags = {"algorithm.settings.num_critic_only_steps": 5}
    chosen, batch = objective("ppo", **flags), batch_of([2, 1], reward=[1.0, 0.0], values=0.0)
    lags = {"versions": Column(np.full(batch.num_tokens, version)), "lag": Column(np.full(batch.num_tokens, lag))}
    batch = batch.with_columns(lags)
    assert chosen.fields == {"values"}
    assert bool(chosen.algorithm.advantages(batch).any()) is not rests
    assert chosen.algorithm.learning_rate_factor(batch) == (0.0 if rests else 1.0)


@pytest.mark.parametrize("name", ["dr_grpo", "dapo", "gspo", "cispo", "topr", "rloo", "reinforce_plus_plus_baseline"])
def test_a_group_of_one_is_refused_where_groups_are_compared(name: str) -> None:
    assert "a group of one has advantage 0" in problems(name, **{"rollout.n_samples_per_prompt": 1})
    assert problems(name) == ""


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "ppo", "precomputed", "on_policy_distillation"])
def test_a_group_of_one_is_allowed_where_none_are(name: str) -> None:
    assert problems(name, **{"rollout.n_samples_per_prompt": 1}) == ""


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("topr", {"algorithm.corrections": "tis"}, "topr and tis each weigh the same tokens"),
        ("topr", {"rollout.rollout_top_p": 0.9, "algorithm.use_rollout_logprobs": False}, "every importance ratio would be wrong"),
        ("dapo", {"algorithm.settings.overlong_buffer_len": 4096, "rollout.rollout_max_response_len": 4096}, "expected less than"),
        ("ppo", {"algorithm.settings.gamma": 1.5}, "gamma: got 1.5; expected"),
        ("rloo", {"algorithm.settings.grpo_std_normalization": True}, "no setting of rloo; it belongs to cispo, dapo, dr_grpo, grpo, gspo"),
        ("on_policy_distillation", {"algorithm.kl_coef": 0.1}, "has its own KL, to the teacher"),
        (
            "on_policy_distillation",
            {"algorithm.settings.opd_reward_coef": 1, "rollout.n_samples_per_prompt": 1},
            "a group of one has advantage 0",
        ),
    ],
)
def test_what_contradicts_is_refused_with_the_reason(name: str, flags: dict[str, Any], message: str) -> None:
    assert message in problems(name, **flags)
