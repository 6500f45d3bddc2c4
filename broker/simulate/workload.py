"""How long everything takes: what a simulation is given, or what was measured in a run."""

import math
import random
from itertools import pairwise
from statistics import NormalDist, fmean
from typing import Annotated

from msgspec import Meta

from broker.state.rules import Checked, HeldOutSet, Rules
from slimebus.bus.errors import ConfigError
from slimebus.config.schema import Natural, NonNegative, Positive

Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Rate = Annotated[float, Meta(ge=1e-6, le=1e12)]
Cores = Annotated[float, Meta(ge=0, le=1e6)]

NUM_QUANTILES = 101
LONGEST, MOST_SIGMA = 1e9, 10.0
"""Tokens of a sample, and deviation of the logarithm of lengths, at most."""
MOST_SAMPLES, WORKER_SAMPLES = 20_000_000, 100
"""What is played at most, and how many samples a worker costs as much as."""


class Workload(Checked, frozen=True):
    """A run as a timed model. Lengths in trained tokens of a sample, times in seconds, staleness in versions.

    Raises ConfigError for what cannot be simulated; it begins with the name of the field.
    """

    steps: Positive = 200
    """[steps] To simulate."""
    batch: Positive = 32
    """[groups] A step."""
    samples: Positive = 8
    """[samples] A group."""
    max_staleness: NonNegative = 1
    """[versions] The bound; inf for none."""
    publish_interval: Positive = 1
    """[steps] A version."""
    eval_interval: Natural = 0
    """[versions] Between evaluations, which the same workers make; 0: none."""
    eval_samples: Natural = 0
    """[samples] Of an evaluation, one a prompt."""
    workers: Positive = 1
    """[processes] Rollout workers."""
    groups_per_worker: Positive = 64
    """[groups] That a worker samples at once."""
    lengths: tuple[float, ...] = (1.0, 1000.0)
    """[tokens] Evenly spaced quantiles of a sample's, the least first; a length is drawn by linear interpolation."""
    worker_tokens_per_s: Rate = 2000.0
    """[tokens/s] Of one worker with many samples."""
    token_s: Seconds = 0.0
    """[seconds] Least time of one token of one sample; 0: a single sample may have the whole worker."""
    overhead_s: Seconds = 0.0
    """[seconds] Of a group beside its tokens (prompt, reward, put)."""
    step_s: Seconds = 1.0
    """[seconds] Of a training step, besides its tokens."""
    trainer_tokens_per_s: Annotated[float, Meta(ge=1e-6)] = math.inf
    """[tokens/s] Of the trainer."""
    publish_s: Seconds = 0.0
    """[seconds] That a version holds the trainer up."""
    pull_s: Seconds = 0.0
    """[seconds] From a version's publish until workers serve it."""
    cores: Cores = 0
    """[cores] That trainer and workers share, less what others use of them; 0: each has its own."""
    worker_cores: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    """[cores] Kept busy by a worker that samples, its share of the broker included; the trainer keeps one busy."""
    load_s: Seconds = 0.0
    """[seconds] That a worker makes no tokens while it loads a version."""
    seed: Natural = 0
    """[number] Of the lengths."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.lengths or list(self.lengths) != sorted(self.lengths) or not 1 <= self.lengths[0] <= self.lengths[-1] <= LONGEST:
            raise ConfigError(f"lengths {self.lengths[:5]}; expected rising quantiles of 1 to {LONGEST:g} tokens")
        sampled = self.samples * self.batch
        evaluated = self.eval_samples / self.eval_interval if self.eval_interval else 0.0
        if self.workers * WORKER_SAMPLES > MOST_SAMPLES:
            raise ConfigError(f"workers is {self.workers}; expected 1 to {MOST_SAMPLES // WORKER_SAMPLES}")
        if self.steps * (sampled + evaluated) > MOST_SAMPLES:
            most = int(MOST_SAMPLES / (sampled + evaluated))
            raise ConfigError(f"steps is {self.steps}; expected 1 to {most}, with {sampled + evaluated:g} samples each")

    def rules(self) -> Rules:
        """The broker's rules; its waits and deadlines never run out, as the simulation has its own clients."""
        return Rules(
            batch_size=self.batch,
            samples_per_prompt=self.samples,
            max_staleness=self.max_staleness,
            publish_interval=self.publish_interval,
            eval_interval=self.eval_interval if self.eval_samples else 0,
            eval_datasets={"heldout": HeldOutSet(num_prompts=self.eval_samples)} if self.eval_interval and self.eval_samples else {},
            num_steps=self.steps,
            buffer_capacity=0,
            max_parked=self.workers + 16,
            max_clients=self.workers + 16,
        )

    def length(self, rng: random.Random) -> float:
        """Tokens of one sample."""
        at = rng.random() * (len(self.lengths) - 1)
        low = int(at)
        return self.lengths[low] + (at - low) * (self.lengths[math.ceil(at)] - self.lengths[low])

    @property
    def mean_length(self) -> float:
        """Tokens of a sample, on average."""
        return fmean((a + b) / 2 for a, b in pairwise(self.lengths)) if len(self.lengths) > 1 else self.lengths[0]

    def speed(self, running: int) -> float:
        """Tokens a second of each of `running` samples of one worker."""
        return min(1 / self.token_s if self.token_s else math.inf, self.worker_tokens_per_s / running)

    def pace(self, active: float) -> float:
        """Seconds of work done a second where so many cores could be kept busy."""
        return min(1.0, self.cores / active) if self.cores and active else 1.0

    def train_seconds(self, tokens: float) -> float:
        """Of a step with so many trained tokens."""
        return self.step_s + tokens / self.trainer_tokens_per_s


def lognormal_lengths(mean: float, sigma: float, longest: float) -> tuple[float, ...]:
    """Quantiles of a log-normal length of this mean, cut at `longest`. sigma: of its logarithm; 0: all equal. Raises ConfigError."""
    if not (1 <= mean <= LONGEST and 1 <= longest <= LONGEST and 0 <= sigma <= MOST_SIGMA):
        tokens = f"--mean-length {mean:g} and --max-length {longest:g}: expected 1 to {LONGEST:g} tokens"
        raise ConfigError(f"{tokens}; --length-sigma {sigma:g}: expected 0 to {MOST_SIGMA:g}")
    at = [(i + 0.5) / NUM_QUANTILES for i in range(NUM_QUANTILES)]
    mu = math.log(mean) - sigma**2 / 2
    return tuple(max(1.0, min(longest, math.exp(mu + sigma * NormalDist().inv_cdf(q)))) for q in at)
