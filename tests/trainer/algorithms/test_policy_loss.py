"""The policy loss, its corrections and the KL estimators against hand numbers."""

import math

import pytest
import torch

from slimebus.cli.config.schema import AlgorithmConfig
from trainer.algorithms.aggregation import masked_sum, token_mean
from trainer.algorithms.kl import k1, k2, k3
from trainer.algorithms.policy import clipped_loss, policy_loss, truncated_weight
from trainer.algorithms.sft import sft_loss
from trainer.algorithms.terms import TokenTerms


def terms(new, *, old=0.0, rollout=0.0, reference=0.0, advantage=1.0, entropy=0.0):
    new = torch.tensor(new, requires_grad=True)
    like = lambda value: torch.full_like(new, value).detach()  # noqa: E731
    return TokenTerms(new, like(entropy), like(old), like(rollout), like(reference), like(advantage))


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
    got, flag = clipped_loss(torch.tensor([math.log(ratio)]), torch.tensor([advantage]), (0.8, 1.28))
    assert got.item() == pytest.approx(loss)
    assert flag.item() == clipped


def test_a_clipped_token_has_no_gradient_and_another_has_its_ratio():
    given = terms([math.log(1.5), math.log(1.1)])
    policy_loss(given, AlgorithmConfig()).loss.sum().backward()
    assert given.new_logprobs.grad.tolist() == pytest.approx([0.0, -1.1])


def test_truncated_weight_is_capped_and_has_no_gradient():
    assert truncated_weight(torch.tensor([math.log(3.0), math.log(0.5)]), torch.zeros(2), 2.0).tolist() == pytest.approx([2.0, 0.5])


def test_tis_as_the_only_correction_weighs_the_gradient_of_log_p():
    given = terms([math.log(3.0), math.log(0.5)], old=9.0, advantage=2.0)
    outcome = policy_loss(given, AlgorithmConfig(use_tis=True, use_rollout_logprobs=True))
    outcome.loss.sum().backward()
    assert given.new_logprobs.grad.tolist() == pytest.approx([-4.0, -1.0])  # -min(w, 2) * A
    assert outcome.measures["tis_clipfrac"].tolist() == [1.0, 0.0]


def test_tis_with_recomputed_old_logprobs_weighs_the_clipped_loss():
    given = terms([0.0], old=0.0, rollout=-math.log(1.5), advantage=1.0)
    outcome = policy_loss(given, AlgorithmConfig(use_tis=True, use_rollout_logprobs=False))
    assert outcome.loss.item() == pytest.approx(-1.5)


def test_kl_and_entropy_terms_are_added_with_their_weights():
    given = terms([math.log(0.5)], old=math.log(0.5), reference=math.log(0.25), entropy=2.0)
    loss = policy_loss(given, AlgorithmConfig(kl_loss_coef=0.1, kl_loss_type="k3", entropy_coef=0.01)).loss
    assert loss.item() == pytest.approx(-1.0 + 0.1 * (0.5 - 1 + math.log(2)) - 0.01 * 2.0)


def test_kl_estimators_by_hand():
    p, q = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    assert k1(p, q).item() == pytest.approx(math.log(2))
    assert k2(p, q).item() == pytest.approx(math.log(2) ** 2 / 2)
    assert k3(p, q).item() == pytest.approx(0.5 - 1 + math.log(2))


def test_kl_estimators_are_unbiased_over_a_distribution():
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.25, 0.25])
    want = float((p * (p / q).log()).sum())
    for estimate in (k1, k3):
        assert float((p * estimate(p.log(), q.log())).sum()) == pytest.approx(want, rel=1e-5)


def test_an_extreme_ratio_stays_finite():
    given = terms([100.0], advantage=-1.0)
    loss = policy_loss(given, AlgorithmConfig()).loss
    assert torch.isfinite(loss).all()


def test_sft_is_the_negative_logprob():
    assert sft_loss(terms([-2.0]), AlgorithmConfig(loss_type="sft_loss")).loss.item() == 2.0


def test_masked_tokens_count_nothing_even_when_not_finite():
    values, mask = torch.tensor([1.0, float("nan"), 3.0]), torch.tensor([1.0, 0.0, 1.0])
    assert masked_sum(values, mask).item() == 4.0
    assert token_mean(values, mask, 8.0).item() == 0.5
