"""How long everything takes: what a simulation is given, or what was measured in a run."""

import math
import random
from statistics import NormalDist
from typing import Annotated

import msgspec
from msgspec import Meta

from broker.state.rules import Rules
from slimebus.bus.errors import ConfigError

Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]
Rate = Annotated[float, Meta(gt=0)]

NUM_QUANTILES = 101


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run as a timed model. Lengths in trained tokens of a sample, times in seconds, staleness in versions.

    steps: training steps. batch: groups a step, of `samples` each. workers: each samples up to `groups_per_worker` groups at once.
    lengths: evenly spaced quantiles of a sample's tokens, the least first; a length is drawn by linear interpolation.
    worker_tokens_per_s: of one worker with many samples; `token_s` is the least time of one token of one sample, so that
    few samples do not use the engine up. overhead_s: of a group beside its tokens (prompt, reward, put).
    step_s: of a training step, and `trainer_tokens_per_s` for its tokens on top. publish_s: how long the trainer is held up by a
    version; pull_s: from then until a worker serves it.
    life_s: mean time between failures of a worker, 0 for none; its groups are lost for `lease_s`, it is back after `restart_s`.
    """

    steps: Count = 200
    batch: Count = 32
    samples: Count = 8
    max_staleness: Annotated[float, Meta(ge=0)] = 1
    publish_interval: Count = 1
    over_sampling: Natural = 0
    workers: Count = 1
    groups_per_worker: Count = 64
    lengths: tuple[float, ...] = (1.0, 1000.0)
    worker_tokens_per_s: Rate = 2000.0
    token_s: Seconds = 0.0
    overhead_s: Seconds = 0.0
    step_s: Seconds = 1.0
    trainer_tokens_per_s: Rate = math.inf
    publish_s: Seconds = 0.0
    pull_s: Seconds = 0.0
    life_s: Seconds = 0.0
    lease_s: Seconds = 60.0
    restart_s: Seconds = 10.0
    seed: Natural = 0

    def __post_init__(self) -> None:
        if not self.lengths or list(self.lengths) != sorted(self.lengths) or self.lengths[0] < 1:
            raise ConfigError(f"lengths {self.lengths[:5]}; expected rising quantiles of at least 1 token")

    def rules(self) -> Rules:
        """What the broker is told; its waits and deadlines never run out, as the simulation has its own clients."""
        return Rules(
            batch_size=self.batch,
            samples_per_prompt=self.samples,
            max_staleness=self.max_staleness,
            publish_interval=self.publish_interval,
            over_sampling=self.over_sampling,
            num_steps=self.steps,
            buffer_capacity=0,
            max_parked=2 * self.workers + 16,
            max_clients=2 * self.workers + 16,
        )

    def length(self, rng: random.Random) -> float:
        """Tokens of one sample."""
        at = rng.random() * (len(self.lengths) - 1)
        low = int(at)
        high = min(low + 1, len(self.lengths) - 1)
        return self.lengths[low] + (at - low) * (self.lengths[high] - self.lengths[low])

    @property
    def mean_length(self) -> float:
        """Tokens of a sample, on average."""
        inner = sum(self.lengths[1:-1])
        return (
            (inner + (self.lengths[0] + self.lengths[-1]) / 2) / max(1, len(self.lengths) - 1) if len(self.lengths) > 1 else self.lengths[0]
        )

    def speed(self, running: int) -> float:
        """Tokens a second of each of `running` samples of one worker."""
        return min(1 / self.token_s if self.token_s else math.inf, self.worker_tokens_per_s / running)

    def train_seconds(self, tokens: float) -> float:
        """Of a step with so many trained tokens."""
        return self.step_s + tokens / self.trainer_tokens_per_s


def lognormal_lengths(mean: float, sigma: float, longest: float) -> tuple[float, ...]:
    """Quantiles of a log-normal length of this mean, cut at `longest`. sigma: of its logarithm; 0: all equal."""
    at = [(i + 0.5) / NUM_QUANTILES for i in range(NUM_QUANTILES)]
    mu = math.log(mean) - sigma**2 / 2
    return tuple(max(1.0, min(longest, math.exp(mu + sigma * NormalDist().inv_cdf(q)))) for q in at)
