"""What the state is made of: the records that are kept, and the requests that wait."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from broker.state.groups import Group
from slimebus.bus.messages import NO_VERSION, Command, CommandReply, EngineReport, Scalar
from slimebus.telemetry.scores import Scores


class Keyed(msgspec.Struct, kw_only=True):
    """What a client asked for under a key, so that a repeat is known; `serial` orders such records."""

    key: str
    serial: int


class PushRecord(Keyed):
    """A push that was accepted: the digest of its records, and the numbers its prompts got."""

    digest: str
    lane: str
    first: int
    count: int


class SettingsChange(Keyed):
    """Settings changed by one request: name -> (old, new), from the first step that is chosen under the new ones."""

    by: str
    step: int
    changed: dict[str, tuple[Scalar, Scalar]]


class Meta(msgspec.Struct, kw_only=True):
    """The counters that must survive. next_step: the first step not committed; oldest_kept_step: the first with kept samples.

    base_step, base_version: of the last resume. From pace_step on, step s trains version pace_version + s // K - pace_step // K.
    step_seconds: times of the last steps, as the watchdog counts them. mean_tokens: of the last groups put, num_measured of them.
    finished_num_steps: of the rules when the trainer finished; a run that is restarted with more is not finished.
    trainer: name and instance that resumed last, the only one that trains; lineages: the last ones begun;
    fork_steps: the step at which each of them left what the broker held of the one before.
    num_freed_once: freed groups with prompts that only the store had. last_reject: (epoch, request) of the trainer.
    settings: those in force; overrides: name -> [what the config said, what was set].
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
    oldest_kept_step: int = 0
    next_lease: int = 1
    next_epoch: int = 1
    next_read_position: int = 1
    next_ended: int = 1
    step_seconds: list[float] = []
    next_evaluation: int = 1
    finishing: bool = False
    finished_num_steps: int = 0
    trainer: tuple[str, str] = ("", "")
    lineages: list[str] = []
    fork_steps: list[int] = []
    moves: dict[str, int] = {}
    lags: dict[int, int] = {}
    waste: dict[str, list[int]] = {}
    counted: dict[str, int] = {}
    ended: dict[str, int] = {}
    num_measured: int = 0
    mean_tokens: float = 0.0
    filtered_in_a_row: int = 0
    num_freed_once: int = 0
    last_reject: tuple[int, int] = (0, 0)
    settings: dict[str, Scalar] = {}
    overrides: dict[str, list[Scalar]] = {}
    num_changes: int = 0

    def newest(self) -> dict[str, Any]:
        """The newest version as messages name it."""
        return {"lineage": self.lineage, "version": self.version, "publishers": self.publishers, "digest": self.digest}


class ClientRecord(msgspec.Struct, kw_only=True):
    """Who takes part. `key`: the name of the key it joined with. From `heard_at` on it is learned again after a restart.

    previous_instances: older processes of this name; successors: newer ones that have said nothing but hello. host, pid: where it says
    it is. release: of slimebus. peer: the socket identity it was last heard from, empty until it is heard. told_in: its first request with
    an answer that said that the run is finished. knows_end: it has asked for more since.
    newcomers: instances that were told to wait for its place, and when they first asked.
    """

    name: str
    role: str
    epoch: int
    instance: str
    previous_instances: list[str] = []
    is_fenced: bool = False
    key: str = ""
    successors: list["ClientRecord"] = []
    host: str = ""
    pid: int = 0
    release: str = ""
    settings: dict[str, str] = {}
    heard_at: float = 0.0
    peer: bytes = b""
    newcomers: dict[str, float] = {}
    is_gone: bool = False
    told_in: int = 0
    knows_end: bool = False
    state: str = ""
    lineage: str = ""
    serving: int = NO_VERSION
    metrics: dict[str, float] = {}
    engines: list[EngineReport] = []
    commands: dict[str, Command] = {}
    outcomes: dict[str, CommandReply] = {}
    blocked_s: float = 0.0
    blocked_at: str = ""

    @property
    def title(self) -> str:
        """Role and name, for people; once where they are the same, as a trainer's mostly are."""
        return self.role if self.role == self.name else f"{self.role} {self.name}"


class StepRecord(msgspec.Struct, kw_only=True):
    """The groups of a step, in order, the version trained in it and the bound they were chosen under; their bytes once it is committed."""

    step: int
    version: int
    groups: list[str]
    max_staleness: float = math.inf
    is_committed: bool = False
    size_bytes: int = 0


class Tally(Scores, kw_only=True):
    """Sums over the samples of one held-out set, and the versions that made them."""

    num_prompts: int
    oldest_version: int = NO_VERSION
    newest_version: int = NO_VERSION


class Evaluation(Keyed):
    """One evaluation of a version on some held-out sets."""

    lineage: str
    version: int
    step: int
    tallies: dict[str, Tally]
    is_done: bool = False
    reason: str = ""


class ConsumerRecord(msgspec.Struct, kw_only=True):
    """What is kept of a consumer: it has acknowledged every position up to `position`. fields: how many it has put, by name."""

    name: str
    position: int = 0
    num_read: int = 0
    num_skipped: int = 0
    fields: dict[str, int] = {}


class Cause(msgspec.Struct, frozen=True):
    """Whom something waits for (a role, and which processes of it; of a broker: its source, buffer, filter or store), and a sentence."""

    role: str
    who: list[str]
    reason: str


class BatchWanted(msgspec.Struct, frozen=True, kw_only=True):
    """What a buffer filter is asked for: exactly `num_groups` groups, or groups of at most `num_tokens` tokens (0: no such bound)."""

    step: int
    version: int
    num_groups: int
    num_tokens: int


BufferFilter = Callable[[Sequence[Group], BatchWanted], list[Group]]
"""Chooses the groups of a batch, in order, from those that are ready. Raises HookError."""


class Rows(NamedTuple):
    """A table of records: their type, the attribute under which each is kept, and what the loss of one costs."""

    kind: type[msgspec.Struct]
    key: str
    cost: str


ROWS = {
    "meta": Rows(Meta, "", "the run cannot go on"),
    "groups": Rows(Group, "id", "its prompt is sampled again, unless its samples were fetched already"),
    "ended": Rows(Group, "id", "the group is not listed any more"),
    "clients": Rows(ClientRecord, "name", "the process joins again by itself"),
    "steps": Rows(StepRecord, "step", "it is made again from its groups"),
    "evaluations": Rows(Evaluation, "key", "its result is lost; ask for the evaluation again"),
    "consumers": Rows(ConsumerRecord, "name", "the consumer reads from the beginning"),
    "pushes": Rows(PushRecord, "key", "a repeat of the push would add its prompts again"),
    "changes": Rows(SettingsChange, "key", "a repeat of the change would be put in force again"),
}
"""By table, msgpack; the other tables hold opaque bytes."""


RECENT = 64


class Pace:
    """What is remembered of the pace of the run, in memory only but for the times of the last steps (Meta.step_seconds).

    Times in seconds of the machine's clock, of the last steps.

    intervals: between commits. last_progress_at: when the run last moved; progress_key: what it looked like then; num_tokens: what workers
    reported when it was last asked. num_trainers: that had joined. assigned_at: when the next step's batch was chosen.
    """

    def __init__(self) -> None:
        self.intervals: deque[float] = deque(maxlen=RECENT)
        self.last_progress_at = 0.0
        self.num_tokens = 0.0
        self.stalled_at: float | None = None
        self.progress_key: tuple[Any, ...] = ()
        self.next_step, self.lineage = 0, ""
        self.has_stepped = False
        self.num_trainers = 0
        self.assigned, self.assigned_at = -1, 0.0


def quantile(values: Iterable[float], share: float) -> float:
    """The least value that at least `share` of them do not exceed; 0 when there are none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0
