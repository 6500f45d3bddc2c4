"""How far the sampler is from the policy being trained, by lag: the metrics `lag/BUCKET/NAME` of a batch.

d = log(p_new / p_rollout) of each trained token, before its optimizer step   n of a bucket
"""

import math

import numpy as np

from trainer.batches.batch import Batch, spans
from trainer.objective.clip import LOG_RATIO_LIMIT
from trainer.objective.importance import effective_share, log_ratios
from trainer.objective.plugin import Clip

BUCKETS = ("0", "1", "2", "3-4", "5-8", "9+")
LAST_OF_BUCKET = (0, 1, 2, 4, 8)
MAX_TOKENS = 2**20
"""Measured of a batch: 0.25 s on one thread. All of 64M tokens would take 15 s of every step."""
QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}


def thin_samples(batch: Batch, samples: np.ndarray, new_logprobs: np.ndarray) -> Batch:
    """These samples (rising indices) with the new_logprobs of all their tokens; of more than MAX_TOKENS tokens some, evenly spaced."""
    lengths = batch.lengths[samples]
    chosen = np.arange(0, len(samples), max(1, -(-int(lengths.sum()) // MAX_TOKENS)))
    tokens = spans((np.cumsum(lengths) - lengths)[chosen], lengths[chosen])
    return batch.select(samples[chosen]).with_columns({"new_logprobs": new_logprobs[tokens]})


def metrics_by_lag(batch: Batch, clip: Clip | None, old: str | None) -> dict[str, float]:
    """The metrics of each bucket that has a token, and of `all` (docs/algorithms.md lists them); those that are not finite are left out.

    The batch has `new_logprobs`, of the training pass. clip: of the ratio to column `old`; either None: nothing is clipped. A token is in
    the bucket of its lag, a sample in that of its oldest trained token.
    """
    is_trained = batch["loss_mask"] > 0
    d, lag = log_ratios(batch, "new_logprobs")[is_trained], batch["lag"][is_trained]
    counts = batch.sample_sums(np.ones(batch.num_tokens))
    has_tokens = counts > 0
    sums, counts = batch.sample_sums(log_ratios(batch, "new_logprobs"))[has_tokens], counts[has_tokens]
    oldest = np.maximum.reduceat(np.where(is_trained, batch["lag"], 0), batch.starts)[has_tokens]
    bucket, sample_bucket = np.searchsorted(LAST_OF_BUCKET, lag), np.searchsorted(LAST_OF_BUCKET, oldest)
    sides = clip_sides(batch, clip, old)[is_trained] if clip and old else None
    metrics = dict[str, float]()
    for name, tokens, samples in [
        ("all", slice(None), slice(None)),
        *((name, bucket == i, sample_bucket == i) for i, name in enumerate(BUCKETS)),
    ]:
        values = token_metrics(d[tokens], None if sides is None else sides[tokens])
        values |= sample_metrics(sums[samples], counts[samples])
        metrics |= {f"lag/{name}/{what}": value for what, value in values.items() if math.isfinite(value)}
    return metrics


def clip_sides(batch: Batch, clip: Clip, old: str) -> np.ndarray:
    """[N]: 0 where the ratio to column `old` is within the range, 2 where it is outside and the clip takes the gradient away, else 1."""
    log_ratio = log_ratios(batch, "new_logprobs", clip.level, to=old)
    ratio = np.exp((log_ratio if clip.level == "token" else batch.to_tokens(log_ratio)).clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    is_high, is_low = ratio > clip.high, ratio < clip.low
    return (is_high | is_low) + (is_high & (batch["advantages"] > 0) | is_low & (batch["advantages"] < 0)).astype(np.int8)


def token_metrics(d: np.ndarray, sides: np.ndarray | None) -> dict[str, float]:
    """Of the log ratios of tokens, [n], in bucket of n, and their clip_sides; nothing where there is none."""
    if not len(d):
        return {}
    sizes, log_ratio = np.sort(np.abs(d)), d.clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = np.exp(log_ratio)
    clipped = {} if sides is None else {"clip_pressure": float((sides > 0).mean()), "clip_active": float((sides == 2).mean())}
    k1 = float(-d.mean())
    return {
        "tokens": float(len(d)),
        **{f"log_ratio_{name}": float(sizes[math.ceil(q * len(d)) - 1]) for name, q in QUANTILES.items()},
        "kl_k1": k1,
        "kl_k3": float(ratio.mean() - 1.0 - log_ratio.mean()),
        "m2": float(np.square(d).mean()),
        "chi2": float(np.square(ratio).mean() - 1.0),
        **clipped,
        "ess_token": effective_share(d),
    }


def sample_metrics(sums: np.ndarray, counts: np.ndarray) -> dict[str, float]:
    """Of samples, from the sum of d over each one's trained tokens and their number, [n]; nothing where there is none."""
    if not len(sums):
        return {}
    return {"samples": float(len(sums)), "ess_sequence": effective_share(sums), "ess_geometric": effective_share(sums / counts)}
