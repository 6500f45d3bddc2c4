"""What the state is made of: the records that are kept, and the requests that wait."""

import math
from typing import Generic, Protocol, TypeVar

import msgspec

from broker.state.effects import Address, Table
from broker.state.groups import Group
from slimebus.messages import NO_VERSION, Batch, Evaluate, Lease, Read, Scalar


class PushRecord(msgspec.Struct, kw_only=True):
    """A push that was accepted: its key, the digest of its records, and the numbers its prompts got."""

    key: str
    serial: int
    digest: str
    lane: str
    first: int
    count: int


class Change(msgspec.Struct, kw_only=True):
    """Settings changed by one request: name -> (old, new), from the first step that is chosen under the new ones."""

    key: str
    by: str
    step: int
    changed: dict[str, tuple[Scalar, Scalar]]


class Meta(msgspec.Struct, kw_only=True):
    """The counters that must survive. next_step: the first step not committed; floor: the first whose samples are kept.

    base_step, base_version: of the last resume. From pace_step on, step s trains version pace_version + s // K - pace_step // K.
    step_seconds: times of the last steps, as the watchdog counts them. mean_tokens: of the last groups put, num_measured of them.
    finisher_born: when the trainer started that finished the run; a hello of that one or of an older one is a late one.
    archived: ranges [start, stop) of the steps whose records are on disk only (broker/state/archive.py).
    settings: those in force; overrides: name -> [what the config said, what was set]; changes: the last of them.
    """

    run: str = ""
    fingerprint: str = ""
    cursor: int = 0
    source_ended: bool = False
    pushed: dict[str, tuple[int, int]] = msgspec.field(default_factory=lambda: {"front": (0, 0), "push": (0, 0)})
    num_pushes: int = 0
    lineage: str = ""
    version: int = NO_VERSION
    publishers: list[str] = []
    digest: str = ""
    base_step: int = 0
    base_version: int = 0
    pace_step: int = 0
    pace_version: int = 0
    next_step: int = 0
    floor: int = 0
    next_lease: int = 1
    next_admitted: int = 1
    next_epoch: int = 1
    next_arrival: int = 1
    step_seconds: list[float] = []
    next_evaluation: int = 1
    finishing: bool = False
    finisher_born: float = 0.0
    moves: dict[str, int] = {}
    lags: dict[int, int] = {}
    waste: dict[str, list[int]] = {}
    counted: dict[str, int] = {}
    ended: dict[str, int] = {}
    num_measured: int = 0
    mean_tokens: float = 0.0
    filtered_in_a_row: int = 0
    archived: list[tuple[int, int]] = []
    settings: dict[str, Scalar] = {}
    overrides: dict[str, list[Scalar]] = {}
    changes: list[Change] = []


class ClientRecord(msgspec.Struct, kw_only=True):
    """What is kept of a client. `key`: the name of the key it joined with."""

    name: str
    role: str
    epoch: int
    instance: str
    former: list[str] = []
    is_fenced: bool = False
    born: float = 0.0
    key: str = ""


class Client(ClientRecord, kw_only=True):
    """Who takes part. What ClientRecord lacks does not survive a restart and is learned again."""

    heard_at: float = 0.0
    is_gone: bool = False
    state: str = ""
    lineage: str = ""
    serving: int = NO_VERSION
    metrics: dict[str, float] = {}


class StepRecord(msgspec.Struct, kw_only=True):
    """The groups of a step, in order, the version trained in it and the bound they were chosen under.

    Metrics are the trainer's, kept for the last steps.
    """

    step: int
    version: int
    groups: list[str]
    max_staleness: float = math.inf
    is_committed: bool = False
    metrics: dict[str, float] = {}


class Tally(msgspec.Struct, kw_only=True):
    """Sums over the samples of one held-out set. `is_binary` while every reward was 0 or 1."""

    num_prompts: int
    num_done: int = 0
    num_samples: int = 0
    num_failed: int = 0
    total: float = 0.0
    total_squares: float = 0.0
    is_binary: bool = True
    oldest_version: int = NO_VERSION
    newest_version: int = NO_VERSION


class Evaluation(msgspec.Struct, kw_only=True):
    """One evaluation of a version on some held-out sets."""

    key: str
    serial: int
    lineage: str
    version: int
    step: int
    tallies: dict[str, Tally]
    is_done: bool = False
    reason: str = ""


M = TypeVar("M", Lease, Batch, Read, Evaluate)


class Parked(msgspec.Struct, Generic[M], kw_only=True):
    """A request that waits: for capacity, a batch, groups to read, results."""

    to: Address
    client: str
    message: M


class Records(Protocol):
    """Reads one stored record of what is not kept in memory: ended groups, steps freed long ago."""

    def __call__(self, table: Table, key: str) -> bytes | None: ...


class Consumer(msgspec.Struct, kw_only=True):
    """What is kept of a consumer: it has acknowledged every position up to `position`. fields: how many it has put, by name."""

    name: str
    position: int = 0
    num_read: int = 0
    num_skipped: int = 0
    fields: dict[str, int] = {}


ROWS: dict[str, type[msgspec.Struct]] = {
    "meta": Meta,
    "groups": Group,
    "ended": Group,
    "clients": ClientRecord,
    "steps": StepRecord,
    "freed": StepRecord,
    "evaluations": Evaluation,
    "consumers": Consumer,
    "pushes": PushRecord,
}
"""Table -> what its records are, msgpack; the other tables hold opaque bytes."""
