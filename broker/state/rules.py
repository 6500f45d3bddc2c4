"""The constants of a run, checked once."""

import math
from typing import Literal

import msgspec

from slimebus.errors import ConfigError
from slimebus.messages import Scalar

Sampling = dict[str, Scalar | list[str | int]]


class EvalDataset(msgspec.Struct, kw_only=True, frozen=True):
    """A held-out set: how many prompts it has, samples drawn per prompt and the sampling parameters."""

    num_prompts: int
    num_samples: int = 1
    sampling: Sampling = {}


class Rules(msgspec.Struct, kw_only=True, frozen=True):
    """What the state machine obeys. Times in seconds, sizes in groups, staleness in versions.

    batch_size: groups a step (B). samples_per_prompt: samples a group (n). max_staleness: eta; inf is unbounded.
    publish_interval: steps between versions (K). num_steps: None runs until the source ends.
    on_stale: what happens to a ready group that grew too old: `requeue` its prompt, `drop` it, or `wait` (a batch waits for
    the leased groups that would be too old for the next one; what is too old all the same is requeued).
    lease_s: a lease lives this long after its last heartbeat. client_timeout_s: silence after which a client counts as gone.
    max_attempts: failed attempts (failed, expired) before a group is dead. buffer_capacity: leased + ready + assigned groups;
    0 is what the bound can use (`capacity`).
    batch_tokens: tokens a step instead of batch_size groups, which is then the first guess of how many fill it; 0: by groups.
    over_sampling: groups that may be started for each step, at least batch_size; 0: batch_size. stale_wait_s: with `wait`, the longest
    that a full batch waits. needs_spread: a group whose rewards are all equal is dropped; max_filtered of them in a row end the run.
    max_parked: requests waiting for an answer, max_parked_per_client: of one client.
    max_clients: names that are joined. stall_min_s: a run without a step for less than this never counts as stalled.
    max_pushed: pushed prompts waiting to be sampled. waits_for_push: the run does not end when no prompt is left, more may be pushed.
    required_fields: a group is in no batch before it has all of them. hedge_after: a group is leased a second time once it takes so many
    times the usual; 0: never. eval_interval: versions between evaluations, 0 for none.
    """

    batch_size: int
    samples_per_prompt: int = 1
    max_staleness: float = 1
    publish_interval: int = 1
    num_steps: int | None = None
    on_stale: Literal["requeue", "drop", "wait"] = "requeue"
    lease_s: float = 60.0
    heartbeat_s: float = 2.0
    client_timeout_s: float = 30.0
    max_attempts: int = 5
    buffer_capacity: int = 4096
    batch_tokens: int = 0
    over_sampling: int = 0
    stale_wait_s: float = 600.0
    needs_spread: bool = False
    max_filtered: int = 1024
    max_parked: int = 4096
    max_parked_per_client: int = 64
    max_clients: int = 4096
    max_pushed: int = 1_000_000
    waits_for_push: bool = False
    stall_min_s: float = 30.0
    required_fields: list[str] = []
    hedge_after: float = 0.0
    sampling: Sampling = {}
    eval_datasets: dict[str, EvalDataset] = {}
    eval_interval: int = 0
    eval_first: bool = True

    @property
    def is_unbounded(self) -> bool:
        """True when samples of any age are trained."""
        return self.max_staleness == math.inf

    @property
    def capacity(self) -> int:
        """Groups leased, ready or assigned at once: as given, or what the bound can use and two batches for what is out of order."""
        return self.capacity_for(self.batch_size)

    def capacity_for(self, groups: float) -> int:
        """The same when a batch has about so many groups."""
        if self.buffer_capacity:
            return self.buffer_capacity
        ahead = UNBOUNDED_BATCHES if self.is_unbounded else int(self.max_staleness) + 1
        return math.ceil((ahead * self.publish_interval + 2) * groups * self.width)

    @property
    def width(self) -> float:
        """Groups started for each group trained: 1 without over-sampling."""
        return self.over_sampling / self.batch_size if self.over_sampling else 1.0

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            _at_least(name, getattr(self, name), least)
        _at_least("num_steps", self.num_steps or 0, 0)
        if not self.is_unbounded and (self.max_staleness > MAX_STALENESS or self.max_staleness != int(self.max_staleness)):
            raise ConfigError(f"max_staleness is {self.max_staleness}; expected a whole number of versions, or inf for no bound")
        if self.on_stale not in ON_STALE:
            raise ConfigError(f"on_stale is {self.on_stale!r}; expected one of {', '.join(ON_STALE)}")
        if self.over_sampling and self.over_sampling < self.batch_size:
            raise ConfigError(
                f"over_sampling_batch_size {self.over_sampling} is below the batch of {self.batch_size} groups; expected more, or 0"
            )
        if self.needs_spread and self.samples_per_prompt < 2:
            raise ConfigError("groups of one sample have no reward spread, so the dynamic sampling filter would drop all; sample 2 or more")
        for name in ("lease_s", "heartbeat_s", "client_timeout_s", "stale_wait_s", "stall_min_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected seconds above 0")
        if self.lease_s <= self.heartbeat_s:
            raise ConfigError(f"lease_s {self.lease_s} must exceed heartbeat_s {self.heartbeat_s}, or every lease expires")
        if self.capacity < self.batch_size:
            raise ConfigError(f"buffer_capacity {self.buffer_capacity} is below batch_size {self.batch_size}; no batch would ever fill")
        if self.batch_size > MAX_BATCH_SIZE:
            raise ConfigError(f"batch_size is {self.batch_size} groups; at most {MAX_BATCH_SIZE} fit one batch reply")
        for name, dataset in self.eval_datasets.items():
            _at_least(f"eval_datasets.{name}.num_prompts", dataset.num_prompts, 1)
            _at_least(f"eval_datasets.{name}.num_samples", dataset.num_samples, 1)
            if not name or len(name) > 64 or "/" in name:
                raise ConfigError(f"eval dataset name {name!r}; expected 1 to 64 characters without '/'")


COUNTED_FROM_1 = ("batch_size", "samples_per_prompt", "publish_interval", "max_attempts", "max_filtered", "max_pushed")
LEAST = {
    **dict.fromkeys((*COUNTED_FROM_1, "max_parked", "max_parked_per_client", "max_clients"), 1),
    **dict.fromkeys(("max_staleness", "hedge_after", "eval_interval", "batch_tokens"), 0),
}
ON_STALE = ("requeue", "drop", "wait")
UNBOUNDED_BATCHES = 4
"""Batches of room when no staleness bound limits how far ahead workers may run."""
MAX_STALENESS = 1 << 40
"""Versions; more is no bound, and then inf says so."""
MAX_BATCH_SIZE = 2048
"""A batch reply names every group in one header of at most 64 KiB: about 25 bytes a group."""


def _at_least(name: str, got: float, least: float) -> None:
    if not got >= least:
        raise ConfigError(f"{name} is {got}; expected at least {least}")
