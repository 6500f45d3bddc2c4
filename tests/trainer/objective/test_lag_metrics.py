"""The metrics by lag against a slow version over samples, and their edges."""

import math

import numpy as np
import pytest
from loss_rows import batch_of, row_of

from slimebus.config import RunConfig
from slimebus.config.schema import AlgorithmConfig
from trainer.objective import lag_metrics
from trainer.objective.build_objective import build_objective
from trainer.objective.lag_metrics import metrics_by_lag, thin_samples
from trainer.objective.plugin import Clip

CLIP = Clip(0.8, 1.28)


def test_a_bucket_by_hand():
    ln2 = math.log(2)
    batch = batch_of([2, 1, 1], new_logprobs=[ln2, -ln2, 0.0, 0.1], lag=[1, 1, 1, 4], advantages=[1.0, 1.0, 1.0, -1.0])
    got = metrics_by_lag(batch, CLIP, "rollout_logprobs")
    one = {name.removeprefix("lag/1/"): value for name, value in got.items() if name.startswith("lag/1/")}
    assert one == pytest.approx(
        {
            "tokens": 3,
            "log_ratio_p50": ln2,  # of 0, ln 2, ln 2
            "log_ratio_p95": ln2,
            "log_ratio_p99": ln2,
            "log_ratio_max": ln2,
            "kl_k1": 0,
            "kl_k3": (2 + 0.5 + 1) / 3 - 1,
            "m2": 2 * ln2**2 / 3,
            "chi2": (4 + 0.25 + 1) / 3 - 1,
            "clip_pressure": 2 / 3,
            "clip_active": 1 / 3,  # a good token below the range keeps its gradient
            "ess_token": 3.5**2 / (3 * 5.25),
            "samples": 2,
            "ess_sequence": 1,
            "ess_geometric": 1,
        },
        abs=1e-6,
    )
    assert {name.split("/")[1] for name in got} == {"all", "1", "3-4"}
    assert got["lag/3-4/kl_k1"] == pytest.approx(-0.1)


def test_buckets_equal_a_loop_over_tokens_and_samples():
    draw = np.random.default_rng(0)
    lengths = [5, 1, 7, 3, 9, 2]
    lag, d = draw.integers(0, 12, sum(lengths)), draw.normal(0, 0.5, sum(lengths))
    got = metrics_by_lag(batch_of(lengths, new_logprobs=d, lag=lag), CLIP, "rollout_logprobs")
    for name, low, high in [("0", 0, 0), ("1", 1, 1), ("2", 2, 2), ("3-4", 3, 4), ("5-8", 5, 8), ("9+", 9, 99)]:
        tokens = [x for x, k in zip(d, lag, strict=True) if low <= k <= high]
        assert got.get(f"lag/{name}/tokens", 0) == len(tokens)
        if tokens:
            w = np.exp(tokens)
            assert got[f"lag/{name}/ess_token"] == pytest.approx(w.sum() ** 2 / (len(w) * (w**2).sum()), rel=1e-5)
            assert got[f"lag/{name}/log_ratio_p95"] == pytest.approx(np.quantile(np.abs(tokens), 0.95, method="inverted_cdf"), rel=1e-5)
        ends = np.cumsum(lengths)
        spans = [slice(end - n, end) for end, n in zip(ends, lengths, strict=True)]
        sums = [d[span].sum() for span in spans if low <= lag[span].max() <= high]
        assert got.get(f"lag/{name}/samples", 0) == len(sums)
        if sums:
            w = np.exp(sums)
            assert got[f"lag/{name}/ess_sequence"] == pytest.approx(w.sum() ** 2 / (len(w) * (w**2).sum()), rel=1e-5)


def test_what_is_masked_or_not_finite_is_left_out():
    batch = batch_of([2, 2], new_logprobs=[0.1, 0.1, 0.2, 0.2], lag=[0, 0, 1, 1])
    masked = batch["loss_mask"].copy()
    masked[[4, 5]] = 0
    spoiled = np.where(masked > 0, batch["rollout_logprobs"], -np.inf)
    got = metrics_by_lag(batch.with_columns({"loss_mask": masked, "rollout_logprobs": spoiled}), CLIP, "rollout_logprobs")
    assert {name.split("/")[1] for name in got} == {"all", "0"}
    assert got["lag/all/tokens"] == 2
    assert got["lag/all/samples"] == 1
    bad = metrics_by_lag(batch.with_columns({"new_logprobs": np.full(6, np.nan)}), None, None)
    assert all(math.isfinite(value) for value in bad.values())


def test_a_step_without_a_trained_token_or_a_sampler_has_none(build_policy, tied_model, make_batch):
    algorithm = build_objective(RunConfig(algorithm=AlgorithmConfig(advantage_estimator="sft")))
    assert algorithm.lag_metrics(batch_of([1], new_logprobs=0.0, lag=0)) == {}
    policy = build_policy(tied_model)
    batch = make_batch()
    for group in batch:
        for sample in group.samples:
            sample.reward = 0.5
    assert not any(name.startswith("lag/") for name in policy.train(batch, num_steps=2))


def test_metrics_of_several_optimizer_steps_are_of_all_that_was_trained(build_policy, tied_model, make_batch):
    policy = build_policy(tied_model)
    metrics = policy.train(make_batch(), num_steps=2, version=3)
    assert metrics["lag/3-4/tokens"] == metrics["lag/all/tokens"] == metrics["tokens_trained"]
    assert metrics["lag/all/kl_k3"] == pytest.approx(metrics["approx_kl"], rel=1e-4)
    assert metrics["lag/all/log_ratio_max"] == pytest.approx(metrics["logprob_mismatch_max"], rel=1e-5)


@pytest.mark.parametrize(
    ("algorithm", "is_clipped"),
    [
        ({}, True),
        ({"corrections": ["opsm"]}, True),
        ({"advantage_estimator": "gspo"}, True),
        ({"advantage_estimator": "cispo", "settings": {"eps_clip": 0.2, "eps_clip_high": 0.2}}, True),
        ({"use_rollout_logprobs": False}, False),
        ({"corrections": ["tis"]}, False),
        ({"corrections": ["m2po"]}, False),
        ({"corrections": ["a3po"], "use_rollout_logprobs": False}, False),
        ({"advantage_estimator": "topr"}, False),
        ({"advantage_estimator": "dppo"}, False),
    ],
)
def test_clip_metrics_are_those_of_the_clip_that_is_there(algorithm, is_clipped):
    chosen = build_objective(RunConfig(algorithm=AlgorithmConfig(**algorithm)))
    d = np.random.default_rng(0).normal(0, 0.4, 40)
    batch = batch_of([25, 10, 5], new_logprobs=d, lag=1, current_logprobs=d, advantages=np.where(np.arange(40) % 3, 1.0, -1.0))
    batch = batch.with_columns(chosen.prepare(batch))
    row = row_of(batch, d.tolist(), old=chosen.old_column(batch))
    clipped = chosen.loss(row).measures.get("pg_clipfrac")
    got = chosen.lag_metrics(batch)
    assert ("lag/all/clip_active" in got) == ("lag/1/clip_pressure" in got) == is_clipped
    if is_clipped and algorithm.get("advantage_estimator") != "cispo":  # CISPO caps the weight on either side, whatever the advantage
        assert got["lag/all/clip_active"] == pytest.approx(float(clipped.mean()))
        assert 0 < got["lag/all/clip_active"] < got["lag/all/clip_pressure"]


def test_a_clip_that_the_engines_error_fills_is_warned_of_once(caplog):
    batch = batch_of([10, 10], new_logprobs=0.01, lag=0, advantages=1.0)
    narrow = build_objective(RunConfig(algorithm=AlgorithmConfig(advantage_estimator="gspo")))
    for _ in range(2):
        narrow.lag_metrics(batch)
        build_objective(RunConfig()).lag_metrics(batch)
    (warning,) = caplog.records
    assert "at lag 0 the clip to 0.997 - 1.003 took the gradient of 100% of the tokens away" in warning.getMessage()


def test_a_large_batch_is_measured_by_evenly_spaced_samples(monkeypatch):
    monkeypatch.setattr(lag_metrics, "MAX_TOKENS", 2_000)
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 40, 1000).tolist()
    new = draw.normal(0, 0.3, sum(lengths))
    batch = batch_of(lengths, new_logprobs=new, lag=1)
    samples = np.flatnonzero(np.arange(1000) % 5)  # the others were not trained
    few = thin_samples(batch, samples, batch.select(samples)["new_logprobs"])
    assert 1_500 < few.num_tokens < 2_200
    assert set(few["new_logprobs"].tolist()) <= set(batch.select(samples)["new_logprobs"].tolist())
    all_of_it, part = metrics_by_lag(batch, None, None), metrics_by_lag(few, None, None)
    assert part["lag/1/m2"] == pytest.approx(all_of_it["lag/1/m2"], rel=0.1)
    assert part["lag/1/ess_token"] == pytest.approx(all_of_it["lag/1/ess_token"], rel=0.05)
