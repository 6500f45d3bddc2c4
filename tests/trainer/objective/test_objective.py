"""The clipped policy loss, TIS and the terms of the objective against hand numbers."""

import math

import pytest
import torch
from loss_rows import batch_of, gradient, in_order, row_of

from slimebus.config import RunConfig
from slimebus.config.schema import AlgorithmConfig
from trainer.objective.aggregation import masked_sum
from trainer.objective.build_objective import build_objective
from trainer.objective.clip import clipped_loss
from trainer.objective.kl import k1, k2, k3, kl_term
from trainer.objective.plugin import Clip

LN2 = math.log(2)


def objective(**algorithm):
    return build_objective(RunConfig(algorithm=AlgorithmConfig(**algorithm)))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, 0),
        (1.5, 2.0, -2.56, 1),  # above 1.28 and good: no gradient
        (1.5, -2.0, 3.0, 0),  # above 1.28 and bad: pushed down in full
        (0.5, 2.0, -1.0, 0),
        (0.5, -2.0, 1.6, 1),  # below 0.8 and bad: no gradient
    ],
)
def test_clip_by_hand(ratio, advantage, loss, clipped):
    got = clipped_loss(torch.tensor([math.log(ratio)]), torch.tensor([advantage]), Clip(0.8, 1.28))
    assert got.loss.item() == pytest.approx(loss)
    assert got.measures["pg_clipfrac"].item() == clipped


def test_a_negative_advantage_costs_at_most_the_dual_clip():
    log_ratio = torch.tensor([math.log(5.0), math.log(2.0)], requires_grad=True)
    got = clipped_loss(log_ratio, torch.tensor([-2.0, -2.0]), Clip(0.8, 1.28), 3.0)
    assert got.loss.tolist() == pytest.approx([6.0, 4.0])
    assert got.measures["pg_clipfrac"].tolist() == [1.0, 0.0]
    got.loss.sum().backward()
    assert log_ratio.grad.tolist() == pytest.approx([0.0, 4.0])


def test_the_largest_ratio_that_keeps_its_gradient_is_reported():
    row = row_of(batch_of([3], advantages=[-1.0, -1.0, 1.0]), [math.log(30), math.log(0.1), math.log(90)])
    assert in_order(row, objective().loss(row).measures["pg_ratio_max"]) == pytest.approx([30, 0, 0])
    bounded = objective(settings={"eps_clip_c": 3.0}).loss(row)
    assert in_order(row, bounded.measures["pg_ratio_max"]) == [0, 0, 0]


@pytest.mark.parametrize(
    ("name", "settings", "low", "high"),
    [
        ("grpo", {}, 0.8, 1.2),
        ("grpo", {"eps_clip": 0.1}, 0.9, 1.1),
        ("grpo", {"eps_clip": 0.1, "eps_clip_high": 0.3}, 0.9, 1.3),
        ("dapo", {}, 0.8, 1.28),
        ("gspo", {"eps_clip": 0.2}, 0.8, 1.2),
        ("ppo", {"eps_clip_high": 0.0}, 0.8, 1.0),
    ],
)
def test_one_bound_of_the_clip_sets_both_unless_the_upper_is_given(name, settings, low, high):
    clip = objective(advantage_estimator=name, settings=settings).algorithm.clip
    assert clip[:2] == pytest.approx((low, high))


def test_tis_as_the_only_correction_weighs_the_gradient_of_log_p():
    chosen = objective(corrections=["tis"])
    batch = batch_of([2], advantages=2.0)
    row = row_of(batch, [math.log(3.0), math.log(0.5)], old=chosen.old_column(batch))
    outcome = chosen.loss(row)
    outcome.loss.sum().backward()
    assert gradient(row) == pytest.approx([-4.0, -1.0])  # -min(w, 2) * A
    assert in_order(row, outcome.measures["tis_clipfrac"]) == [1.0, 0.0]


def test_tis_with_recomputed_old_logprobs_weighs_the_clipped_loss():
    chosen = objective(corrections=["tis"], use_rollout_logprobs=False)
    batch = batch_of([1], rollout_logprobs=-math.log(1.5), old_logprobs=0.0)
    assert chosen.loss(row_of(batch, [0.0], old=chosen.old_column(batch))).loss.item() == pytest.approx(-1.5)


def test_kl_and_entropy_terms_are_added_with_their_weights():
    batch = batch_of([1], rollout_logprobs=math.log(0.5), reference_logprobs=math.log(0.25))
    row = row_of(batch, [math.log(0.5)], entropy=2.0)
    loss = objective(kl_loss_coef=0.1, kl_loss_type="k3", entropy_coef=0.01).loss(row).loss
    assert loss.item() == pytest.approx(-1.0 + 0.1 * (0.5 - 1 + math.log(2)) - 0.01 * 2.0)


def test_kl_estimators_by_hand():
    p, q = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    assert k1(p, q).item() == pytest.approx(math.log(2))
    assert k2(p, q).item() == pytest.approx(math.log(2) ** 2 / 2)
    assert k3(p, q).item() == pytest.approx(0.5 - 1 + math.log(2))


@pytest.mark.parametrize("size", [1e-3, 1e-4, 1e-5])
def test_k3_of_a_small_difference_is_no_rounding(size):
    d = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * size
    assert k3(torch.zeros_like(d), d).mean().item() == pytest.approx(d.double().square().mean().item() / 2, rel=0.02)


def test_kl_estimators_are_unbiased_over_a_distribution():
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.25, 0.25])
    want = float((p * (p / q).log()).sum())
    for estimate in (k1, k3):
        assert float((p * estimate(p.log(), q.log())).sum()) == pytest.approx(want, rel=1e-5)


def test_the_unbiased_kl_of_old_samples_is_the_kl_and_so_is_its_gradient():
    logits = torch.tensor([0.3, -0.2, 0.7], requires_grad=True)
    new, old, q = logits.log_softmax(0), torch.tensor([0.2, 0.5, 0.3]).log(), torch.tensor([0.5, 0.25, 0.25]).log()
    estimate = (old.exp() * kl_term("unbiased", new, old, q)).sum()  # the mean over samples of old
    want = (new.exp() * (new - q)).sum()
    assert estimate.item() == pytest.approx(want.item(), rel=1e-5)
    for mine, true in zip(*(torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (estimate, want)), strict=True):
        assert mine.item() == pytest.approx(true.item(), abs=1e-6)


@pytest.mark.parametrize(
    "given", [{}, {"corrections": ["tis"]}, {"use_rollout_logprobs": False}, {"use_rollout_logprobs": False, "corrections": ["a3po"]}]
)
def test_the_unbiased_kl_weighs_samples_of_the_rollout_whatever_old_is(given):
    chosen = objective(kl_loss_coef=1.0, kl_loss_type="unbiased", **given)
    batch = batch_of([1], advantages=0.0, rollout_logprobs=math.log(0.25), reference_logprobs=math.log(0.5), lag=2)
    row = row_of(batch, [math.log(0.5)], old=chosen.old_column(batch))
    chosen.loss(row).loss.sum().backward()
    assert gradient(row) == pytest.approx([0.0])  # k3 is 0 with slope 0 where new is the reference
    row = row_of(batch, [math.log(0.25)], old=chosen.old_column(batch))
    outcome = chosen.loss(row)
    assert outcome.measures["kl_loss"].item() == pytest.approx(2 - 1 - LN2, rel=1e-5)
    row = row_of(batch, [0.0], old=chosen.old_column(batch))
    assert chosen.loss(row).measures["kl_loss"].item() == pytest.approx(4 * (0.5 - 1 + LN2), rel=1e-5)


def test_an_extreme_ratio_stays_finite():
    assert torch.isfinite(objective().loss(row_of(batch_of([1], advantages=-1.0), [100.0])).loss).all()


def test_sft_is_the_negative_logprob():
    assert objective(advantage_estimator="sft").loss(row_of(batch_of([1]), [-2.0])).loss.item() == 2.0


def test_masked_tokens_count_nothing_even_when_not_finite():
    values, mask = torch.tensor([1.0, float("nan"), 3.0]), torch.tensor([1.0, 0.0, 1.0])
    assert masked_sum(values, mask).item() == 4.0
