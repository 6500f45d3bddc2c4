"""Every correction against numbers worked by hand, a slow obvious version, and finite differences; what they refuse."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from loss_rows import batch_of, gradient, in_order, row_of

from slimebus.config import RunConfig, resolve
from slimebus.config.schema import AlgorithmConfig
from trainer.batches.batch import Batch
from trainer.corrections.m2po import largest_within
from trainer.objective.build_objective import algorithm_problems, build_objective
from trainer.objective.importance import effective_share
from trainer.objective.objective import Objective

LN2, LN3 = math.log(2), math.log(3)
FREE = {"use_rollout_logprobs": True}
OWN_OLD = {"use_rollout_logprobs": False}


def objective(*corrections: str, **given: Any) -> Objective:
    settings = {name: value for name, value in given.items() if name != "use_rollout_logprobs"}
    own = {name: given[name] for name in given if name == "use_rollout_logprobs"}
    return build_objective(RunConfig(algorithm=AlgorithmConfig(corrections=list(corrections), settings=settings, **own)))


def weights(chosen: Objective, batch: Batch, new: list[float]) -> list[float]:
    """Those of the first correction at each trained token."""
    row = row_of(batch, new, old=chosen.old_column(batch))
    correction = chosen.corrections[0]
    if correction.provides_old_logprobs:
        row.old_logprobs = correction.old_logprobs(row)
    return in_order(row, correction.weight(row).weight)


def gradients(chosen: Objective, batch: Batch, new: list[float]) -> list[float]:
    row = row_of(batch, new, old=chosen.old_column(batch))
    chosen.loss(row).loss.sum().backward()
    return gradient(row)


THREE = batch_of([2, 1])  # two samples; rollout_logprobs are 0, so that new_logprobs are log ratios
RATIOS = [LN2, LN3, -LN2]


@pytest.mark.parametrize(
    ("level", "expected"),
    [("token", [2, 2.5, 0.6]), ("sequence", [2.5, 2.5, 0.6]), ("geometric", [math.sqrt(6), math.sqrt(6), 0.6])],
)
def test_tis_truncates_at_both_bounds_at_each_level(level: str, expected: list[float]) -> None:
    assert weights(objective("tis", tis_level=level, tis_clip=2.5, tis_clip_low=0.6), THREE, RATIOS) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("level", "expected"), [("token", [2, 0, 0.5]), ("sequence", [0, 0, 0.5]), ("geometric", [math.sqrt(6), math.sqrt(6), 0.5])]
)
def test_mis_takes_out_what_is_outside_at_each_level(level: str, expected: list[float]) -> None:
    high = 2.5 if level != "token" else 2.1
    assert weights(objective("mis", mis_level=level, mis_high=high, mis_low=0.4), THREE, RATIOS) == pytest.approx(expected)
    assert weights(objective("mis", mis_low=0.6), THREE, RATIOS)[2] == 0


def test_icepop_holds_both_bounds() -> None:
    assert weights(objective("icepop"), batch_of([4]), [math.log(r) for r in (0.4, 0.6, 4.9, 5.1)]) == pytest.approx([0, 0.6, 4.9, 0])


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_normalised_weights_have_mean_1_over_what_they_weigh(level: str) -> None:
    chosen = objective("tis", tis_level=level, tis_batch_normalize=True)
    assert chosen.needs_pass("current_logprobs")
    batch = batch_of([2, 1], current_logprobs=RATIOS)
    batch = batch.with_columns(chosen.prepare(batch))
    got = weights(chosen, batch, RATIOS)
    assert np.mean(got if level == "token" else got[1:]) == pytest.approx(1.0)
    assert got[0] / got[2] == pytest.approx(4)  # 2 / 0.5: truncated first


def test_opsm_drops_bad_samples_that_the_policy_has_left() -> None:
    advantages = [-1.0, -1.0, -1.0, -1.0, 1.0, 1.0, -2.0, 1.0]
    new = [-0.3, 0.2, -0.1, 0.3, -1.0, -1.0, -0.5, -0.5]
    got = weights(objective("opsm", opsm_delta=0.04), batch_of([2, 2, 2, 2], advantages=advantages), new)
    # means -0.05 (out), +0.1 (kept), a good one (kept); the last is bad in all, so no part of it leaks
    assert got == [0, 0, 1, 1, 1, 1, 0, 0]


def test_trm_drops_a_sample_for_one_token() -> None:
    new = [0.0, 0.7, 0.3, 0.3]
    batch = batch_of([2, 2])
    assert weights(objective("trm", trm_max=0.2), batch, new) == [0, 0, 1, 1]  # 0.245 and 0.045
    k3 = math.exp(0.3) - 1 - 0.3  # the mean of the second sample; the first one's is 0.157
    assert weights(objective("trm", trm_mean=k3 + 1e-4), batch, new) == [0, 0, 1, 1]
    assert weights(objective("trm", trm_mean=k3 - 1e-4), batch, new) == [0, 0, 0, 0]


def test_decoupled_weighs_the_clip_against_its_own_old_policy() -> None:
    chosen = objective("decoupled", **OWN_OLD)
    batch = batch_of(
        [4], rollout_logprobs=[-LN2, 0.0, -2 * LN3, -LN2], old_logprobs=[0.0, -LN2, 0.0, 0.0], advantages=[1.0, 1.0, 1.0, -2.0]
    )
    new = [math.log(1.1), math.log(0.59), 0.0, math.log(1.5)]
    assert weights(chosen, batch, new) == pytest.approx([2, 0.5, 0, 2])  # 9 is above the cap of 5
    # w r A where the clip lets it pass: 1.1, 1.18 (a good token is not clipped until 1.2), out, and A < 0 unbounded above
    assert gradients(chosen, batch, new) == pytest.approx([-2 * 1.1, -0.5 * 1.18, 0, 2 * 1.5 * 2])


def test_a3po_interpolates_the_old_policy_by_the_lag_of_each_token() -> None:
    chosen = objective("a3po", **OWN_OLD)
    assert not chosen.recomputes_old_logprobs  # no forward pass
    batch = batch_of([4], lag=[0, 1, 2, 4])
    new = [0.36] * 4
    assert weights(chosen, batch, new) == pytest.approx([1, 1, math.exp(0.18), math.exp(0.27)])  # rho^((k - 1) / k)
    # log r = d / k: 0.36 is clipped (1.43), 0.18 (1.197) and 0.09 are not
    assert gradients(chosen, batch, new) == pytest.approx([0, 0, -math.exp(0.18 + 0.18), -math.exp(0.27 + 0.09)])
    assert weights(chosen, batch_of([1], lag=[4]), [3.0]) == [0]  # exp(2.25) is above the cap


@pytest.mark.parametrize(
    ("advantage", "log_w", "phi"),
    [
        (1, -3, 0.043),
        (1, -2, 0.245),
        (1, -1, 0.90),
        (1, 0, 1),
        (1, 1, 0.043),
        (-1, -2, 0.014),
        (-1, -1, 0.18),
        (-1, 1, 0.65),
        (-1, 2, 0.001),
    ],
)
def test_vespo_kernel_by_the_papers_numbers(advantage: float, log_w: float, phi: float) -> None:
    chosen, batch = objective("vespo"), batch_of([2], advantages=advantage)
    new = [log_w / 2] * 2
    assert weights(chosen, batch, new) == pytest.approx([phi] * 2, abs=6e-3 if phi > 0.1 else 6e-4)
    assert gradients(chosen, batch, new) == pytest.approx([-phi * advantage] * 2, abs=6e-3)


def test_vespo_of_an_extreme_ratio_is_0_and_finite() -> None:
    assert gradients(objective("vespo"), batch_of([2]), [60.0, 60.0]) == [0, 0]


def test_vcpo_truncates_the_product_and_scales_the_learning_rate() -> None:
    chosen = objective("vcpo")
    batch = batch_of([2, 1, 1], rollout_logprobs=0.0)
    new = [2 * LN2, 2 * LN2, 0.0, 0.0]
    assert weights(chosen, batch, new) == pytest.approx([8, 8, 1, 1])  # 16, truncated
    seen = np.zeros(batch.num_tokens)
    seen[batch["loss_mask"] > 0] = new
    assert chosen.learning_rate_factor(batch, seen) == pytest.approx(math.sqrt((16 + 1 + 1) ** 2 / (3 * (256 + 1 + 1))))
    half = objective("vcpo", vcpo_base_ess=0.25)
    assert half.learning_rate_factor(batch, seen) == 1
    assert chosen.learning_rate_factor(batch, seen * 1000) == pytest.approx(math.sqrt(1 / 3))  # no overflow: one sample has it all


def test_effective_share_by_hand() -> None:
    assert effective_share(np.zeros(5)) == 1
    assert effective_share(np.array([])) == 1
    assert effective_share(np.array([math.log(4), 0.0])) == pytest.approx(25 / 34)
    assert effective_share(np.array([5000.0, 0.0, -5000.0])) == pytest.approx(1 / 3)


def slow_m2po(d: np.ndarray, advantages: np.ndarray, tau: float) -> np.ndarray:
    """The paper's words: take out the largest one by one."""
    active = [i for i in range(len(d)) if (advantages[i] > 0 and d[i] > 0) or (advantages[i] < 0 and d[i] < 0)]
    kept = np.ones(len(d))
    while active and np.mean([d[i] ** 2 for i in active]) > tau:
        worst = max(active, key=lambda i: d[i] ** 2)
        kept[worst] = 0
        active.remove(worst)
    return kept


@pytest.mark.parametrize("tau", [0.0, 0.001, 0.04, 10.0])
def test_m2po_masks_as_the_slow_version_over_the_whole_step(tau: float) -> None:
    draw = np.random.default_rng(1)
    d, advantages = draw.normal(0, 0.4, 60), draw.choice([-1.0, 0.0, 1.0], 60)
    chosen = objective("m2po", m2po_tau=tau)
    assert chosen.needs_pass("current_logprobs")
    batch = batch_of([20, 30, 10], current_logprobs=d, advantages=advantages)
    batch = batch.with_columns(chosen.prepare(batch))
    want = slow_m2po(d, advantages, tau)
    assert batch["m2po_kept"][batch["loss_mask"] > 0].tolist() == want.tolist()
    assert gradients(chosen, batch, d.tolist()) == pytest.approx((-want * np.exp(d) * advantages).tolist(), rel=1e-5)
    assert batch["loss_weight"][1] == pytest.approx(1 / 60)  # the denominator keeps what is masked


def test_m2po_without_an_active_token_masks_none() -> None:
    assert largest_within(np.array([]), 0.04).tolist() == []
    chosen = objective("m2po")
    batch = batch_of([3], current_logprobs=[1.0, 1.0, 1.0], advantages=-1.0)
    assert chosen.prepare(batch)["m2po_kept"].values.tolist() == [1, 1, 1, 1]


def test_dppo_by_hand() -> None:
    chosen = build_objective(RunConfig(algorithm=AlgorithmConfig(advantage_estimator="dppo")))
    rollout, new = [0.5, 0.5, 0.1, 0.6], [0.8, 0.3001, 0.001, 0.3]
    batch = batch_of([4], rollout_logprobs=np.log(rollout), advantages=[1.0, -1.0, -1.0, -1.0])
    row = row_of(batch, np.log(new).tolist())
    outcome = chosen.loss(row)
    assert in_order(row, outcome.measures["dppo_dropped"]) == [1, 0, 0, 1]  # a rare token is never masked from below
    ratio, d = np.divide(new, rollout), np.log(np.divide(new, rollout))
    assert in_order(row, outcome.loss) == pytest.approx((np.array([0, 1, 1, 0]) * ratio + 1e-3 * d**2).tolist(), rel=1e-4)
    outcome.loss.sum().backward()
    assert gradient(row) == pytest.approx((np.array([0, 1, 1, 0]) * ratio + 2e-3 * d).tolist(), rel=1e-4)


EVERY = [
    ("tis", FREE),
    ("mis", FREE),
    ("icepop", FREE),
    ("opsm", FREE),
    ("trm", FREE | {"trm_max": 0.5}),
    ("decoupled", OWN_OLD),
    ("a3po", OWN_OLD),
    ("vespo", FREE),
    ("vcpo", FREE),
    ("m2po", FREE),
]


@pytest.mark.parametrize(("name", "given"), EVERY)
def test_what_is_masked_counts_nothing_where_it_is_not_finite(name: str, given: dict[str, Any]) -> None:
    """An infinity of the sampler at a masked token of a sample, and a sample that is masked altogether."""
    chosen = objective(name, **given)
    level = {"tis_level": "sequence", "tis_batch_normalize": True} if name == "tis" else {}
    chosen = objective(name, **given, **level)
    new = [0.1, -0.2, 0.3, 0.1, 0.2]
    clean = batch_of([3, 2], rollout_logprobs=0.0, old_logprobs=0.05, current_logprobs=new, lag=3)
    masked = clean["loss_mask"].copy()
    masked[[2, 5, 6]] = 0
    spoiled = {"rollout_logprobs": -np.inf, "old_logprobs": np.nan, "current_logprobs": np.inf}
    batches = []
    for spoil in ({}, spoiled):
        columns = {name: np.where(masked > 0, clean[name], value).astype(np.float32) for name, value in spoil.items()}
        batch = clean.with_columns({"loss_mask": masked, **columns})
        batches.append(batch.with_columns(chosen.prepare(batch)))
    results = []
    for batch in batches:
        row = row_of(batch, new, old=chosen.old_column(batch))
        outcome = chosen.loss(row)
        (torch.where(row.loss_mask > 0, outcome.loss, 0.0) * row["loss_weight"]).sum().backward()
        results.append(gradient(row))
        seen = np.where(masked > 0, batch["current_logprobs"], np.nan).astype(np.float32)
        assert math.isfinite(chosen.learning_rate_factor(batch, seen))
    assert results[1] == pytest.approx(results[0])
    assert np.isfinite(results[1]).all()
    assert [results[1][i] for i in (1, 3, 4)] == [0, 0, 0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"corrections": "decoupled"}, "use_rollout_logprobs: true makes the sampler the old policy, so decoupled's weight"),
        ({"corrections": "a3po"}, "would be 1 everywhere; set it to false"),
        ({"corrections": "m2po", "use_rollout_logprobs": False}, "m2po's weight is of the policy being trained and replaces them"),
        ({"corrections": "vespo", "use_rollout_logprobs": False}, "set it to true"),
        ({"corrections": "vcpo", "use_rollout_logprobs": False}, "set it to true"),
        ({"corrections": "tis,mis"}, "algorithm.corrections: tis and mis each weigh the same tokens by their ratio to the sampler"),
        ({"corrections": "decoupled,a3po", "use_rollout_logprobs": False}, "decoupled and a3po each weigh"),
        ({"corrections": "tis", "advantage_estimator": "dppo"}, "dppo and tis each weigh"),
        ({"corrections": "tis", "advantage_estimator": "gspo"}, "gspo is its ratio, but with use_rollout_logprobs: true the weight of tis"),
        ({"corrections": "mis", "advantage_estimator": "cispo"}, "num_passes_per_rollout above 1, or remove mis"),
        ({"corrections": "vespo", "settings.eps_clip": 0.1}, "algorithm.settings.eps_clip: no effect: with use_rollout_logprobs: true the"),
        (
            {"use_rollout_logprobs": False, "settings.eps_clip": 0.1},
            "eps_clip: no effect: with use_rollout_logprobs: false and one",
        ),
        ({"corrections": "tis", "use_rollout_logprobs": False, "settings.eps_clip_high": 0.1}, "settings.eps_clip_high: no effect"),
        ({"advantage_estimator": "gspo", "use_rollout_logprobs": False}, "gspo is its ratio, but with use_rollout_logprobs: false and one"),
        ({"corrections": "trm"}, "trm masks nothing; no default is known to fit"),
        ({"corrections": "tis", "settings.tis_clip_low": 3}, "tis_clip_low: 3 is not below tis_clip's upper bound 2"),
        ({"corrections": "mis", "settings.mis_low": 2}, "mis_low: 2 is not below"),
    ],
)
def test_contradictions_are_refused_with_the_reason(flags: dict[str, Any], message: str) -> None:
    given = {f"algorithm.{name}": value for name, value in flags.items()}
    assert message in "\n".join(algorithm_problems(resolve(None, given, environ={})))


@pytest.mark.parametrize("name", ["opsm", "icepop", "m2po", "vespo", "vcpo"])
def test_a_method_that_reads_rollout_logprobs_is_refused_with_top_p(name: str) -> None:
    flags = {"algorithm.corrections": name, "rollout.rollout_top_p": 0.9}
    assert "every importance ratio would be wrong" in "\n".join(algorithm_problems(resolve(None, flags, environ={})))
    assert algorithm_problems(resolve(None, {"algorithm.corrections": name}, environ={})) == []


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
def test_a_ratio_goes_with_masks_and_with_a_weight_on_old_logprobs_of_the_trainer(name: str) -> None:
    flags = {"algorithm.advantage_estimator": name, "algorithm.settings.eps_clip": 0.1}
    for more in ({"corrections": "opsm"}, {"corrections": "tis", "use_rollout_logprobs": False}):
        given = flags | {f"algorithm.{field}": value for field, value in more.items()} | {"rollout.num_steps_per_rollout": 2}
        assert algorithm_problems(resolve(None, given, environ={})) == []


def test_masks_go_with_a_weight() -> None:
    assert algorithm_problems(resolve(None, {"algorithm.corrections": "tis,opsm"}, environ={})) == []


@pytest.mark.parametrize(
    "algorithm",
    [
        {"corrections": ["m2po"], "settings": {"m2po_tau": 0.005}},
        {"corrections": ["vcpo"]},
        {"corrections": ["tis", "opsm"], "settings": {"tis_level": "sequence", "tis_batch_normalize": True, "opsm_delta": 0.01}},
    ],
    ids=lambda a: a["corrections"][0],
)
def test_what_is_chosen_over_the_whole_step_depends_on_no_packing(
    algorithm: dict[str, Any], build_policy: Any, make_batch: Any, tied_model: Any
) -> None:
    from slimebus.config.schema import OptimizerConfig

    steps = []
    for max_tokens in (1, 40, 100_000):
        policy = build_policy(
            tied_model, algorithm=AlgorithmConfig(**algorithm), optimizer=OptimizerConfig(lr=1e-3), max_tokens_per_gpu=max_tokens
        )
        steps.append(policy.train(make_batch(), num_steps=2))
    for name in {"loss", "grad_norm", "lr", "m2po_dropped", "tis", "opsm_dropped", "vcpo_weight", "lag/all/ess_sequence"} & set(steps[0]):
        assert [step[name] for step in steps[1:]] == pytest.approx([steps[0][name]] * 2, rel=1e-4), name
    assert 0 < steps[0].get("m2po_dropped", 0.5) < 1
