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
"""What is played at most, and how many samples a worker, or its failure, costs as much as."""
MOST_OVER_SAMPLED = 16
"""Batches that may be started for each step."""
MOST_LIVES = 4.0
"""Of a worker that a group may take."""


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
    over_sampling: Natural = 0
    """[groups] Started for each step; 0: as many as are trained."""
    partial_rollouts: Annotated[int, Meta(ge=0, le=1)] = 0
    """[0 or 1] With over_sampling: continue groups that a batch leaves behind too old, instead of sampling them anew."""
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
    life_s: Seconds = 0.0
    """[seconds] Mean time between failures of a worker; 0: none."""
    lease_s: Seconds = 60.0
    """[seconds] After which a failed worker's groups are sampled by others."""
    restart_s: Seconds = 10.0
    """[seconds] Until a failed worker is back."""
    seed: Natural = 0
    """[number] Of the lengths and failures."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.lengths or list(self.lengths) != sorted(self.lengths) or not 1 <= self.lengths[0] <= self.lengths[-1] <= LONGEST:
            raise ConfigError(f"lengths {self.lengths[:5]}; expected rising quantiles of 1 to {LONGEST:g} tokens")
        most = MOST_OVER_SAMPLED * self.batch
        if self.over_sampling and not self.batch <= self.over_sampling <= most:
            raise ConfigError(f"over_sampling is {self.over_sampling}; expected 0, or from the batch of {self.batch} groups to {most}")
        self._check_size()

    def _check_size(self) -> None:
        """Raises ConfigError for what would not end: too much of it, or workers that fail before they have made a group."""
        sampled = self.samples * max(self.batch, self.over_sampling)
        evaluated = self.eval_samples / self.eval_interval if self.eval_interval else 0.0
        if self.workers * WORKER_SAMPLES > MOST_SAMPLES:
            raise ConfigError(f"workers is {self.workers}; expected 1 to {MOST_SAMPLES // WORKER_SAMPLES}")
        if self.steps * (sampled + evaluated) > MOST_SAMPLES:
            most = int(MOST_SAMPLES / (sampled + evaluated))
            raise ConfigError(f"steps is {self.steps}; expected 1 to {most}, with {sampled + evaluated:g} samples each")
        if not self.life_s:
            return
        rate, together = self.worker_tokens_per_s, min(self.groups_per_worker, math.ceil(self.batch / self.workers))
        group_s = self.overhead_s + self.mean_length * max(self.token_s, self.samples * together / rate)
        if group_s > MOST_LIVES * self.life_s:
            raise ConfigError(f"life_s is {self.life_s:g}: workers would fail before they have made a group, which takes {group_s:.3g} s")
        seconds = self.train_seconds(self.mean_length * sampled) + self.publish_s + self.pull_s + group_s
        if self.workers * self.steps * seconds > MOST_SAMPLES * (self.life_s + self.restart_s) / WORKER_SAMPLES:
            raise ConfigError(f"life_s is {self.life_s:g}: too many failures to simulate; take a longer life, or fewer steps")

    def rules(self) -> Rules:
        """The broker's rules; its waits and deadlines never run out, as the simulation has its own clients."""
        return Rules(
            batch_size=self.batch,
            samples_per_prompt=self.samples,
            max_staleness=self.max_staleness,
            publish_interval=self.publish_interval,
            over_sampling=self.over_sampling,
            masks_offpolicy=bool(self.partial_rollouts),
            eval_interval=self.eval_interval if self.eval_samples else 0,
            eval_datasets={"heldout": HeldOutSet(num_prompts=self.eval_samples)} if self.eval_interval and self.eval_samples else {},
            num_steps=self.steps,
            buffer_capacity=0,
            max_parked=2 * self.workers + 16,
            max_clients=2 * self.workers + 16,
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


# --- mean staleness in one line, to see when no simulation is needed ---
#
# After Applied Compute's model of asynchronous RL (3 July 2026): staleness = PQS + IQS, the steps that pass while a sample is made and
# while it waits. Two of the six rows of their table disagree with the formula as published, and their workers are held back by a queue,
# ours by the staleness bound. Our workers hold groups until their longest sample is done, so PQS needs no ratio of lengths.


def evaluated_share(workload: Workload) -> float:
    """Of the samples that workers make, those of evaluations."""
    evaluated = workload.eval_samples / workload.eval_interval / workload.publish_interval if workload.eval_interval else 0.0
    return evaluated / (evaluated + workload.batch * workload.samples)


def made_per_s(workload: Workload) -> float:
    """Batches that all workers could make a second beside the evaluations."""
    per_worker = workload.groups_per_worker * workload.samples
    samples = workload.workers * per_worker * workload.speed(per_worker) / workload.mean_length
    return samples * (1 - evaluated_share(workload)) / (workload.batch * workload.samples)


def load_ratio(workload: Workload) -> float:
    """rho: batches that all workers could make in the time in which the trainer trains one."""
    batch = workload.batch * workload.samples
    return made_per_s(workload) * (workload.train_seconds(batch * workload.mean_length) + workload.publish_s)


def mean_staleness(workload: Workload) -> float:
    """Versions, of a sample's oldest token, for a publish each step. rho >= 1: workers run ahead until the bound holds them back.

    rho < 1: PQS = G / B steps pass while a group is made, G those in flight, B those of a step (Little's law); IQS = rho while it waits for
    its batch to fill, and as long as a version takes to workers.
    """
    rho = load_ratio(workload)
    if rho >= 1:
        return workload.max_staleness
    in_flight = min(workload.workers * workload.groups_per_worker, (workload.max_staleness + 1) * workload.batch)
    made = in_flight * (1 - evaluated_share(workload)) / workload.batch
    return min(workload.max_staleness, made + rho + workload.pull_s * made_per_s(workload))
