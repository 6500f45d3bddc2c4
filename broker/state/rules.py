"""The constants of a run, checked once."""

import math
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from slimebus.bus.errors import ConfigError
from slimebus.bus.messages import MAX_BATCH_SIZE, Count, Positive, Scalar
from slimebus.config.convert import describe
from slimebus.config.schema import NonNegative

Sampling = dict[str, Scalar | list[str | int]]
Seconds = Annotated[float, Meta(gt=0, le=7 * 86400.0)]
"""At most a week."""


class Checked(msgspec.Struct, kw_only=True, frozen=True):
    """Raises ConfigError for a value that the type of its field does not take."""

    def __post_init__(self) -> None:
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            try:
                msgspec.convert(value, field.type)
            except msgspec.ValidationError:
                raise ConfigError(f"{field.name} is {value!r}; expected {describe(field.type)}") from None


class HeldOutSet(Checked, frozen=True):
    """A held-out set: how many prompts it has, samples drawn per prompt and the sampling parameters."""

    num_prompts: Positive
    num_samples: Positive = 1
    sampling: Sampling = {}


class Rules(Checked, frozen=True):
    """What the state machine obeys. Times in seconds, sizes in groups, staleness in versions.

    batch_size: groups a step (B). samples_per_prompt: samples a group (n). max_staleness: eta; inf is unbounded.
    publish_interval: steps between versions (K). num_steps: None runs until the source ends.
    on_stale: what happens to a ready group that grew too old: `requeue` its prompt, or `drop` it.
    lease_s: a lease lives this long after its last heartbeat. client_timeout_s: silence after which a client counts as gone.
    max_attempts: failed attempts (failed, expired) before a group is dead. buffer_capacity: leased + ready + assigned groups;
    0 is what the bound can use (`capacity`).
    batch_tokens: tokens a step instead of batch_size groups, which is then the first guess of how many fill it; 0: by groups.
    over_sampling: groups that may be started for each step, at least batch_size; 0: batch_size. masks_offpolicy: workers do not train the
    tokens that a continued sample had before its lease, so that a partial never grows too stale.
    fill_first: the first batch waits until all groups are ready that the bound allows before it.
    target_ess, staleness_range: max_staleness is changed within this range (settings.py); a target of 0: it is not.
    needs_spread: a group with equal rewards is dropped; max_filtered of them in a row end the run.
    max_parked: requests waiting for an answer, max_parked_per_client: of one client.
    max_clients: names that are joined. stall_min_s: a run without a step for less than this never counts as stalled.
    agreed: settings that every process of the run must have (clients.py:differences).
    max_pushed: pushed prompts waiting to be sampled. waits_for_push: the run does not end when no prompt is left, more may be pushed.
    required_fields: a group is in no batch before it has all of them.
    eval_interval: versions between evaluations, 0 for none. max_freed_bytes: samples that one transaction lets go of under a checkpoint.
    """

    batch_size: Annotated[int, Meta(ge=1, le=MAX_BATCH_SIZE)]
    samples_per_prompt: Positive = 1
    max_staleness: NonNegative = 1
    publish_interval: Positive = 1
    num_steps: Count | None = None
    on_stale: Literal["requeue", "drop"] = "requeue"
    lease_s: Seconds = 60.0
    heartbeat_s: Seconds = 2.0
    client_timeout_s: Seconds = 30.0
    max_attempts: Positive = 5
    buffer_capacity: Count = 4096
    batch_tokens: Count = 0
    over_sampling: Count = 0
    masks_offpolicy: bool = False
    fill_first: bool = False
    target_ess: Annotated[float, Meta(ge=0, le=1)] = 0.0
    staleness_range: tuple[Count, Count] = (0, 0)
    needs_spread: bool = False
    max_filtered: Positive = 1024
    max_parked: Positive = 4096
    max_parked_per_client: Positive = 64
    max_clients: Positive = 4096
    max_pushed: Positive = 1_000_000
    waits_for_push: bool = False
    stall_min_s: Seconds = 30.0
    required_fields: list[str] = []
    sampling: Sampling = {}
    agreed: dict[str, str] = {}
    eval_datasets: dict[str, HeldOutSet] = {}
    eval_interval: Count = 0
    eval_first: bool = True
    max_freed_bytes: Positive = 64 << 20

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
        super().__post_init__()
        for name in self.eval_datasets:
            if not name or len(name) > 64 or "/" in name:
                raise ConfigError(f"eval dataset name {name!r}; expected 1 to 64 characters without '/'")
        if problem := next(self._contradictions(), ""):
            raise ConfigError(problem)

    def _contradictions(self) -> Iterator[str]:
        """Each names settings as the config does."""
        if not self.is_unbounded and (self.max_staleness > MAX_STALENESS or self.max_staleness != int(self.max_staleness)):
            yield f"max_staleness is {self.max_staleness}; expected a whole number of versions, or inf for no bound"
        if self.fill_first and (self.is_unbounded or self.batch_tokens):
            yield "fill_first: expected a max_staleness that is no .inf, and no batch_tokens: without them it is not known what is full"
        low, high = self.staleness_range
        if self.target_ess and not low <= self.max_staleness <= high:
            yield f"max_staleness {self.max_staleness:g} is outside of staleness_range {low} to {high}, which the autopilot keeps"
        if self.over_sampling and self.over_sampling < self.batch_size:
            yield f"over_sampling_batch_size {self.over_sampling} is below the batch of {self.batch_size} groups; expected more, or 0"
        if self.needs_spread and self.samples_per_prompt < 2:
            yield "groups of one sample have no reward spread, so the dynamic sampling filter would drop all; sample 2 or more"
        if self.lease_s <= self.heartbeat_s:
            yield f"lease_s {self.lease_s} must exceed heartbeat_s {self.heartbeat_s}, or every lease expires"
        if self.capacity < self.batch_size:
            yield f"buffer_capacity {self.buffer_capacity} is below rollout_batch_size {self.batch_size}; no batch would ever fill"


UNBOUNDED_BATCHES = 4
"""Batches of room when no staleness bound limits how far ahead workers may run."""
MAX_STALENESS = 1 << 40
"""Versions; more is no bound, and then inf says so."""
