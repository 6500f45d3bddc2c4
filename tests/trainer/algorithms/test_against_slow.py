"""Each algorithm's advantages, loss and gradient on an awkward batch: against loops over plain numbers, finite differences, any packing."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import slow_algorithms as slow
from mixed_batch import loss_and_gradient, mixed_batch, samples_of, with_advantages

from slimebus.config import RunConfig
from slimebus.config.schema import AlgorithmConfig, RolloutConfig
from trainer.batches.batch import Batch, Column
from trainer.objective.build_objective import build_objective
from trainer.objective.objective import Objective
from trainer.objective.plugin_settings import plugin_names

LONGEST = 8


@dataclass(frozen=True)
class Case:
    """An algorithm with settings, and what it should be: advantages by `slow`, loss by kind (slow.token_losses), aggregation."""

    name: str
    advantages: Any
    loss: str = "clip 0.8 1.2"
    aggregation: str = "token"
    algorithm: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def objective(self) -> Objective:
        algorithm = AlgorithmConfig(advantage_estimator=self.name, settings=self.settings, **self.algorithm)
        return build_objective(RunConfig(algorithm=algorithm, rollout=RolloutConfig(rollout_max_response_len=LONGEST)))


def dapo(samples: slow.Samples) -> list[list[float]]:
    """Rewards less 1.5 times the share of the last 6 of 8 tokens that a trajectory uses."""
    lengths = [sum(len(o.at) for o in samples if (o.group, o.trajectory) == (s.group, s.trajectory)) for s in samples]
    punished = [1.5 * min(1.0, max(0.0, (length - 2) / 6)) for length in lengths]
    shaped = [type(s)(**{**vars(s), "reward": s.reward - less}) for s, less in zip(samples, punished, strict=True)]
    return slow.group_advantages(shaped, by_std=True)


def distilled(samples: slow.Samples) -> list[list[float]]:
    rewards = slow.group_advantages(samples, by_std=True)
    pairs = [zip(s.rollout_logprobs, s.teacher_logprobs, row, strict=True) for s, row in zip(samples, rewards, strict=True)]
    return [[-0.5 * (old - teacher) + 2 * a for old, teacher, a in row] for row in pairs]


def baseline(samples: slow.Samples, coef: float) -> list[list[float]]:
    rows = []
    for sample, row in zip(samples, slow.group_advantages(samples, by_std=False), strict=True):
        pairs = zip(row, sample.rollout_logprobs, sample.reference_logprobs, strict=True)
        rows.append([a - coef * slow.kl("k2", p, q) for a, p, q in pairs])
    return slow.whitened(rows)


K1 = {"kl_coef": 0.1, "kl_loss_type": "k1"}
CASES = [
    Case("grpo", lambda s: slow.group_advantages(s, by_std=True), "clip 0.8 1.2"),
    Case(
        "grpo",
        lambda s: slow.group_advantages(slow.with_kl(s, 0.1, "k1"), by_std=True),
        "clip 0.8 1.2 1.5",
        "token",
        K1,
        {"eps_clip_c": 1.5},
    ),
    Case("dapo", dapo, "clip 0.8 1.28", settings={"overlong_buffer_len": 6, "overlong_penalty_factor": 1.5}),
    Case("dr_grpo", lambda s: slow.group_advantages(s, by_std=False), aggregation="constant"),
    Case("gspo", lambda s: slow.group_advantages(s, by_std=True), "sequence 0.997 1.003", "sequence"),
    Case(
        "gspo", lambda s: slow.group_advantages(s, by_std=True), "sequence 0.9 1.1", "sequence", {}, {"eps_clip": 0.1, "eps_clip_high": 0.1}
    ),
    Case("cispo", lambda s: slow.group_advantages(s, by_std=True), "cispo 0 5"),
    Case("cispo", lambda s: slow.group_advantages(s, by_std=True), "cispo 0.8 1.2", settings={"eps_clip": 0.2, "eps_clip_high": 0.2}),
    Case("topr", lambda s: slow.group_advantages(s, by_std=False), "topr", "constant"),
    Case("dppo", lambda s: slow.group_advantages(s, by_std=False), "dppo 0.2 0.001"),
    Case(
        "dppo",
        lambda s: slow.group_advantages(s, by_std=False),
        "dppo 0.02 1",
        settings={"dppo_low": 0.02, "dppo_high": 0.02, "dppo_kl": 1},
    ),
    Case("rloo", slow.leave_one_out, aggregation="constant"),
    Case("rloo", lambda s: slow.leave_one_out(slow.with_kl(s, 0.1, "k1")), aggregation="constant", algorithm=K1),
    Case("reinforce_plus_plus", lambda s: slow.whitened(slow.returns(s, 1.0, 0.0, "k1"))),
    Case("reinforce_plus_plus", lambda s: slow.whitened(slow.returns(s, 0.9, 0.1, "k1")), algorithm=K1, settings={"gamma": 0.9}),
    Case("reinforce_plus_plus_baseline", lambda s: baseline(s, 0.0)),
    Case("reinforce_plus_plus_baseline", lambda s: baseline(s, 0.3), algorithm={"kl_coef": 0.3, "kl_loss_type": "k2"}),
    Case("ppo", lambda s: slow.whitened(slow.gae(s, 1.0, 1.0, 0.0, "k1"))),
    Case(
        "ppo",
        lambda s: slow.gae(s, 0.9, 0.8, 0.1, "k3"),
        algorithm={"kl_coef": 0.1, "kl_loss_type": "k3"},
        settings={"gamma": 0.9, "lambd": 0.8, "normalize_advantages": False},
    ),
    Case("precomputed", lambda s: [sample.advantages for sample in s]),
    Case("on_policy_distillation", distilled, settings={"opd_kl_coef": 0.5, "opd_reward_coef": 2.0}),
]
IDS = [f"{case.name}-{i}" for i, case in enumerate(CASES)]


def batch_for(case: Case, **shape: Any) -> Batch:
    batch = mixed_batch(**shape)
    if case.name == "precomputed":
        given = np.where(batch["loss_mask"] > 0, np.sin(np.arange(batch.num_tokens)), np.nan)
        batch = batch.with_columns({"advantages": Column(given.astype(np.float32))})
    return batch


def spread(batch: Batch, rows: list[list[float]]) -> np.ndarray:
    flat = np.zeros(batch.num_tokens)
    for sample, row in zip(samples_of(batch), rows, strict=True):
        flat[sample.at] = row
    return flat


def slow_loss(case: Case, batch: Batch, new: np.ndarray, frozen: np.ndarray) -> float:
    samples = samples_of(batch)
    total = 0.0
    rows = zip(samples, case.advantages(samples), slow.weights(samples, case.aggregation, LONGEST), strict=True)
    for sample, advantages, weight in rows:
        total += weight * sum(slow.token_losses(case.loss, sample, advantages, list(new[sample.at]), list(frozen[sample.at])))
    return total


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_advantages_are_those_of_the_slow_version(case: Case) -> None:
    batch = batch_for(case)
    got = case.objective().advantages(batch)["advantages"].values
    assert got == pytest.approx(spread(batch, case.advantages(samples_of(batch))), abs=1e-5)
    assert not got[batch["loss_mask"] == 0].any()


@pytest.mark.parametrize("spread_of_logprobs", [0.001, 0.3, 1.0])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_loss_and_gradient_are_those_of_the_slow_version(case: Case, spread_of_logprobs: float) -> None:
    batch = batch_for(case, seed=1, spread=spread_of_logprobs)
    new, trained = batch["new_logprobs"].astype(np.float64), np.flatnonzero(batch["loss_mask"] > 0)
    loss, gradient = loss_and_gradient(case.objective(), with_advantages(case.objective(), batch), new)
    # the loss of GSPO's tokens is written for its gradient; its value is that of the sequence too
    assert loss == pytest.approx(slow_loss(case, batch, new, new), rel=1e-5, abs=1e-6)
    step = 1e-6
    for t in trained:
        up, down = new.copy(), new.copy()
        up[t], down[t] = up[t] + step, down[t] - step
        difference = (slow_loss(case, batch, up, new) - slow_loss(case, batch, down, new)) / (2 * step)
        assert gradient[t] == pytest.approx(difference, rel=1e-4, abs=1e-6), t
    assert np.isfinite(gradient).all()
    assert not gradient[batch["loss_mask"] == 0].any()


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_no_packing_changes_the_loss_or_its_gradient(case: Case) -> None:
    objective = case.objective()
    batch = with_advantages(objective, batch_for(case, seed=2))
    new = batch["new_logprobs"]
    loss, gradient = loss_and_gradient(objective, batch, new)
    for max_tokens in (1, 12, 30):
        packed_loss, packed_gradient = loss_and_gradient(objective, batch, new, max_tokens)
        assert packed_loss == pytest.approx(loss, rel=1e-9)
        assert packed_gradient == pytest.approx(gradient, rel=1e-9, abs=1e-12)


def test_every_algorithm_has_a_case() -> None:
    assert {case.name for case in CASES} | {"sft"} == set(plugin_names("algorithms"))  # sft has no advantages
