"""What an evaluation measures: mean reward and pass@k of held-out prompts, each with a 95% interval."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

import msgspec

Z_95 = 1.959964
"""Standard normal quantile of a two-sided 95% interval."""


class Scores(msgspec.Struct, kw_only=True):
    """Sums over the prompts of one held-out set. is_binary: every reward was 0 or 1. passed: k -> sum of pass@k over prompts."""

    num_done: int = 0
    num_samples: int = 0
    num_failed: int = 0
    total: float = 0.0
    total_squares: float = 0.0
    is_binary: bool = True
    passed: dict[int, float] = {}

    def add(self, rewards: Sequence[float], num_failed: int) -> None:
        """One prompt: the rewards of its samples; those that failed have none, and did not pass."""
        self.num_done += 1
        self.num_samples += len(rewards)
        self.num_failed += num_failed
        self.total += sum(rewards)
        self.total_squares += sum(reward * reward for reward in rewards)
        self.is_binary = self.is_binary and all(reward in (0.0, 1.0) for reward in rewards)
        num, num_right = len(rewards) + num_failed, sum(reward >= 1.0 for reward in rewards)
        for k in (1 << i for i in range(num.bit_length())):
            self.passed[k] = self.passed.get(k, 0.0) + pass_at(k, num, num_right)

    def interval_95(self) -> tuple[float, float]:
        """Wilson's score interval for 0/1 rewards, mean +- z s / sqrt(n) for others."""
        n, mean = self.num_samples, self.total / self.num_samples
        if self.is_binary:
            return wilson(mean, n)
        variance = max(0.0, self.total_squares - n * mean * mean) / max(1, n - 1)
        half = Z_95 * math.sqrt(variance / n)
        return mean - half, mean + half

    def row(self) -> dict[str, Any]:
        """As it is shown. pass_at: k -> mean over prompts, low, high; the interval is Wilson's over prompts."""
        low, high = self.interval_95() if self.num_samples else (None, None)
        means = {k: total / self.num_done for k, total in self.passed.items()}
        return {
            "mean_reward": self.total / self.num_samples if self.num_samples else None,
            "low": low,
            "high": high,
            "interval": "wilson" if self.is_binary else "normal",
            "pass_at": {str(k): [mean, *wilson(mean, self.num_done)] for k, mean in means.items()},
            "num_samples": self.num_samples,
            "num_failed": self.num_failed,
            "num_done": self.num_done,
        }


def of_attempts(attempts: Iterable[int], rewards: Iterable[float | None]) -> tuple[list[float], int]:
    """One reward for each attempt at a prompt, the mean of its samples' (branches, contexts), and the number of attempts without one.

    attempts: which one each sample is of. rewards: None for a sample that failed.
    """
    found = defaultdict[int, list[float]](list)
    for attempt, reward in zip(attempts, rewards, strict=True):
        found[attempt] += [] if reward is None else [reward]
    means = [fmean(values) for values in found.values() if values]
    return means, len(found) - len(means)


def pass_at(k: int, n: int, num_right: int) -> float:
    """The chance that one of k of the n samples is right: 1 - C(n - c, k) / C(n, k). Chen et al. 2021, eq. 1 (arXiv:2107.03374)."""
    return 1.0 - math.comb(n - num_right, k) / math.comb(n, k)


def wilson(accuracy: float, n: int, z: float = Z_95) -> tuple[float, float]:
    """The Wilson score interval of `accuracy` measured on `n` problems, within 0..1; (0, 1) when n is 0.

    Wilson 1927, eq. in https://doi.org/10.1080/01621459.1927.10502953: unlike the normal interval it keeps its promise near 0 and 1.
    """
    if n <= 0:
        return 0.0, 1.0
    scale = 1 + z * z / n
    middle = (accuracy + z * z / (2 * n)) / scale
    half = z / scale * math.sqrt(accuracy * (1 - accuracy) / n + z * z / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)
