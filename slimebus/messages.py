"""Every message on the bus, typed. docs/protocol.md describes each field, its range and its sequence.

A message is the `body` of an envelope; its type on the wire is the class name in snake case. Unknown fields of a newer
peer are ignored, an unknown type is answered with an error. Arrays never stand in a message: they are raw frames behind
the header (slimebus/samples.py), each described here by a `Field`.

    worker    hello -> lease* -> (heartbeat) -> put | give_back -> ... -> goodbye
    trainer   hello -> resume -> publish -> (batch -> fetch* -> publish -> commit)* -> finish
    consumer  hello -> (read -> put_fields*)* -> goodbye
    client    hello -> status | evaluate | push | set
"""

import math
import re
from functools import cache

import msgspec

PROTOCOL_VERSION = 1
"""The newest version of the protocol that this release speaks."""
OLDEST_PROTOCOL = 1
"""The oldest version that it still understands."""
NO_VERSION = -1
"""The version of a token that no policy made: a prompt, a tool's answer, a demonstration."""

Scalar = str | int | float | bool | None


class Message(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """The body of one envelope."""


class Ok(Message):
    """Done; nothing more to say."""


class Error(Message):
    """The request was not done. `code` is stable, `text` is one line for a person; `retryable`: the same may succeed later."""

    code: str
    text: str
    retryable: bool = False


# --- joining ------------------------------------------------------------------------------------------------------


class Hello(Message):
    """First message of a client. `role` is rollout, trainer, consumer or client; the sender's name is in the envelope.

    `instance` is a random id of this process: the same instance saying hello again (after a reconnect) keeps its epoch,
    another instance of the same name gets a new epoch and fences the older one. `born` is when this process started, seconds
    since the epoch (0: not said): a hello that was on its way while its process ended cannot fence the one started after it.
    `protocol` and `oldest` are the newest and the oldest protocol version that the client speaks, `release` is its software's.
    Their defaults are version 1 whatever this release speaks, so that what is left out never changes its meaning.
    """

    role: str
    instance: str
    born: float = 0.0
    protocol: int = 1
    oldest: int = 1
    release: str = ""


class Welcome(Message):
    """What a client must know to take part. `lineage` is empty and `version` NO_VERSION before the first publish.

    `protocol` is the version that both sides speak from now on. `digest` is that of the version, over the tensors of all publishers.
    """

    run: str
    epoch: int
    heartbeat_s: float
    lineage: str = ""
    version: int = NO_VERSION
    publishers: list[str] = []
    digest: str = ""
    hints: str = ""
    max_message_bytes: int = 0
    protocol: int = 1


class Heartbeat(Message):
    """I am alive. Extends the deadline of the leases it lists; `serving` is the verified version (NO_VERSION: none)."""

    state: str = ""
    lineage: str = ""
    serving: int = NO_VERSION
    leases: list[int] = []
    metrics: dict[str, float] = {}


class HeartbeatReply(Message):
    """The truth that hints may have lost. `lost`: listed leases that are no longer held; `finished`: the run is over, leave."""

    lineage: str = ""
    version: int = NO_VERSION
    publishers: list[str] = []
    digest: str = ""
    lost: list[int] = []
    finished: bool = False


class Goodbye(Message):
    """I leave in good order; whatever I still lease is queued again at once."""


class Hint(Message):
    """Published on the XPUB socket: something changed; may be lost."""

    lineage: str = ""
    version: int = NO_VERSION
    publishers: list[str] = []
    digest: str = ""
    finished: bool = False


# --- samples ------------------------------------------------------------------------------------------------------


class Field(Message):
    """One array per sample of a group, concatenated (C order, little-endian) into one bulk frame.

    `shapes[i]` is the shape of sample i; token-aligned fields have shapes [[T_0], [T_1], ...].
    """

    name: str
    dtype: str
    shapes: list[list[int]]


class SampleHeader(Message):
    """What the broker may know of a sample. T = num_tokens is the common length of its token arrays.

    versions: runs (version, length) over the T tokens; NO_VERSION where no policy made them. oldest_version: the oldest
    version among tokens with loss_mask = 1 (NO_VERSION: none of them was made by a policy). reward is None when it failed.
    status: completed | truncated | aborted | failed.
    """

    num_tokens: int
    num_trainable: int
    versions: list[tuple[int, int]]
    oldest_version: int = NO_VERSION
    status: str = "completed"
    reward: float | None = None
    trajectory: int = 0
    session: str = ""
    turn: int = 0
    metadata: dict[str, Scalar] = {}


def has_failed(status: str, reward: float | None, oldest_version: int) -> bool:
    """True for a sample that must not be trained: status failed, or its reward is missing or not finite.

    A demonstration (oldest_version NO_VERSION) needs no reward.
    """
    if status == "failed":
        return True
    return oldest_version != NO_VERSION if reward is None else not math.isfinite(reward)


# --- rollout ------------------------------------------------------------------------------------------------------


class Lease(Message):
    """Ask for up to `want` groups of the run's size; an evaluation of fewer samples counts as a part of one.

    Parked at most `wait_s` seconds until capacity appears; the answer may be empty.

    `serving` is the worker's verified version of `lineage`; a worker that needs no weights says `needs_weights: false`.
    `takes_partials`: it can continue samples that another worker began.
    """

    want: int
    wait_s: float
    lineage: str = ""
    serving: int = NO_VERSION
    needs_weights: bool = True
    takes_partials: bool = False


class LeasedGroup(Message):
    """A right to one group until `deadline_s` seconds from now, extended by heartbeats. kind: train | eval.

    Its prompt record (msgpack map: prompt, label, metadata) is the reply's bulk frame at the same index. `partial_frames`: so
    many frames after all prompt records, in the order of the groups, hold samples to continue: a `GiveBack`, then its fields.
    """

    group: str
    lease: int
    attempt: int
    num_samples: int
    deadline_s: float
    kind: str = "train"
    dataset: str = ""
    sampling: dict[str, Scalar | list[str | int]] = {}
    partial_frames: int = 0


class LeaseReply(Message):
    """The groups granted, oldest prompt first; empty when the wait ran out (`reason` says what was waited for)."""

    groups: list[LeasedGroup] = []
    reason: str = ""


class Put(Message):
    """The finished samples of a leased group; bulk frames: one per field, in order. Idempotent by (group, attempt)."""

    group: str
    lease: int
    attempt: int
    lineage: str
    samples: list[SampleHeader]
    fields: list[Field]
    seconds: float = 0.0


class PutReply(Message):
    """result: accepted (durable), duplicate (this attempt was put before) or discarded (`reason`: the lease was lost, ...)."""

    result: str
    reason: str = ""


class GiveBack(Message):
    """A leased group that yields no samples. outcome: requeue (try again) | drop (filtered out) | fail (counts as a failed attempt)
    | partial (try again from these samples: finished ones, and `aborted` ones to continue by token id).

    Only a partial has samples, fields and bulk frames, as in a put; `lineage` is that of its lease. num_tokens: of the samples that a
    drop makes waste. rewards: of its samples, None for those that failed; a source of prompts may want to know them.
    """

    group: str
    lease: int
    outcome: str
    reason: str
    num_tokens: int = 0
    rewards: list[float | None] = []
    lineage: str = ""
    samples: list[SampleHeader] = []
    fields: list[Field] = []


# --- training -----------------------------------------------------------------------------------------------------


class Resume(Message):
    """The trainer's timeline: it will train `step` next, in a new `lineage` whose first publish is `version`.

    Batches of later steps are ready again; samples made by versions that this timeline never had are queued as prompts.
    """

    step: int
    version: int
    lineage: str


class Publish(Message):
    """Version `version` of `lineage` is complete and can be pulled from `publishers` (addresses of weight servers)."""

    lineage: str
    version: int
    publishers: list[str]
    digest: str = ""


class Batch(Message):
    """The groups of `step`: the same answer until it is committed. Parked at most `wait_s` seconds.

    `trained`: the first step that this trainer has not committed; a broker that knows of fewer has lost its last moments and says so.
    """

    step: int
    wait_s: float
    trained: int = 0


class BatchGroup(Message, array_like=True):
    """One group of a batch; sizes are sums over its samples, oldest_version the oldest over their trainable tokens.

    A msgpack array in this order, not a map: a batch of 2,048 groups must fit one header.
    """

    group: str
    num_samples: int
    num_tokens: int
    oldest_version: int = NO_VERSION


class BatchReply(Message):
    """Empty `groups`: not ready within the wait, and `reason` says who waits for whom. `version` is the one being trained.

    next_version: what the step after this one trains; publish it before the commit when it is above `version`.
    max_staleness: the bound that these groups were chosen under; None is unbounded.
    """

    step: int
    version: int = NO_VERSION
    groups: list[BatchGroup] = []
    reason: str = ""
    next_version: int = NO_VERSION
    max_staleness: int | None = None


class Fetch(Message):
    """The samples of these assigned groups; the trainer keeps the sum of their sizes below the message bound."""

    groups: list[str]


class FetchReply(Message):
    """For each group, `num_frames` bulk frames: its record header (a msgpack `Put`), then one frame per field."""

    num_frames: list[int] = []


class Commit(Message):
    """`step` was trained. unused: group -> reason, for groups that gave no gradient. Idempotent.

    checkpoint: the first step that the newest durable checkpoint has yet to train; groups of earlier steps are freed.
    """

    step: int
    checkpoint: int = 0
    unused: dict[str, str] = {}
    metrics: dict[str, float] = {}


class Finish(Message):
    """The last step is trained: workers are told to leave, the broker keeps answering until they did."""

    reason: str = ""


# --- consumers ----------------------------------------------------------------------------------------------------


class Read(Message):
    """The next groups behind position `after`, which is thereby acknowledged with all before it. Parked at most `wait_s` seconds.

    needs: fields that a group must have; reading goes no further than the first group that lacks one. extras: of the fields beyond
    tokens, loss_mask and rollout_logprobs, just these (None: all). shard, shards: only positions p with p % shards == shard.
    """

    count: int
    wait_s: float
    after: int = 0
    needs: list[str] = []
    extras: list[str] | None = None
    shard: int = 0
    shards: int = 1


class ReadGroup(Message):
    """One group of a read; sizes and versions as in a batch. `attempt` names its samples when fields are put to it."""

    group: str
    attempt: int
    position: int
    num_frames: int
    num_samples: int
    num_tokens: int
    oldest_version: int = NO_VERSION


class ReadReply(Message):
    """For each group, `num_frames` bulk frames: its record header (a msgpack `Put`), then one frame per field, late ones last.

    position: the cursor, up to which everything is acknowledged. num_skipped: positions before the last group given that are gone.
    """

    groups: list[ReadGroup] = []
    position: int = 0
    num_skipped: int = 0
    reason: str = ""
    finished: bool = False


class PutFields(Message):
    """More fields of a group that waits to be trained; bulk frames: one per field, in order. Idempotent by (group, attempt, name)."""

    group: str
    attempt: int
    fields: list[Field]


class PutFieldsReply(Message):
    """result: accepted (durable), duplicate (they are there) or gone (`reason`: trained, sampled again, dropped)."""

    result: str
    reason: str = ""


# --- people and tools ---------------------------------------------------------------------------------------------


class Status(Message):
    """Ask for the whole picture; the answer's bulk frame is one JSON object."""


class StatusReply(Message):
    """Bulk frame 0: the status, JSON."""


class Keys(Message):
    """Ask for the allow-list: whose keys may pull weights. `have`: the generation that the asker knows; it is not sent again."""

    have: int = 0


class KeysReply(Message):
    """Bulk frame 0, when the list is another than `have`: JSON, one [public key, name, role] for each key. generation 0: no keys."""

    generation: int = 0


class Evaluate(Message):
    """Queue an evaluation of the newest version on `datasets` (empty: all). Repeating the same `key` starts nothing new."""

    key: str
    datasets: list[str] = []
    wait_s: float = 0.0


class EvaluateReply(Message):
    """Bulk frame 0: JSON, a list of results, empty while it runs (`reason` says what is still missing)."""

    done: bool
    reason: str = ""


class Set(Message):
    """Change settings of the run while it goes on, by their config names; empty: ask for what is in force.

    Repeating the same `key` changes nothing again and gets the first answer. All of them are changed or none.
    """

    key: str
    settings: dict[str, Scalar] = {}


class SetReply(Message):
    """changed: name -> [old, new], for those that differ. step: the first step that is chosen under the new ones.

    settings: every setting that can be changed and its value now. An unbounded max_staleness is infinity.
    """

    step: int
    changed: dict[str, tuple[Scalar, Scalar]] = {}
    settings: dict[str, Scalar] = {}


class Edit(Message):
    """Change groups by hand. action: drop (take out of the run) | replay (try a dead or dropped group again, failures forgotten)."""

    action: str
    groups: list[str]
    reason: str = ""


class Import(Message):
    """Take in one group from a file: bulk frame 0 is its prompt record, then one frame for each of `fields`.

    Without samples, or with samples of versions that this run never had, the prompt is queued. Repeating it changes nothing.
    """

    group: str
    lineage: str = ""
    samples: list[SampleHeader] = []
    fields: list[Field] = []


class EditReply(Message):
    """done: group -> what became of it. refused: group -> why nothing was changed."""

    done: dict[str, str] = {}
    refused: dict[str, str] = {}


class Push(Message):
    """Prompts to sample, one bulk frame each: a record as in `lease_reply`. Repeating the same `key` adds nothing.

    front: before the prompts that were pushed without it.
    """

    key: str
    front: bool = False


class PushReply(Message):
    """The prompts are durable. accepted, duplicate: how many are new, and how many a push of this key brought before.

    first: the group id of the first; the others follow by number (`push/17`, `push/18`). waiting: pushed prompts not sampled yet.
    """

    accepted: int
    duplicate: int = 0
    first: str = ""
    waiting: int = 0


@cache
def wire_name(cls: type[Message]) -> str:
    """The type on the wire of a message class: `HeartbeatReply` is `heartbeat_reply`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


REQUESTS = (
    *(Hello, Heartbeat, Goodbye, Lease, Put, GiveBack, Resume, Publish, Batch, Fetch, Commit, Finish),
    *(Read, PutFields, Status, Keys, Evaluate, Set, Push, Edit, Import),
)
REPLIES = (
    *(Ok, Error, Welcome, HeartbeatReply, LeaseReply, PutReply, BatchReply, FetchReply),
    *(ReadReply, PutFieldsReply, StatusReply, KeysReply, EvaluateReply, SetReply, PushReply, EditReply),
)
TYPES: dict[str, type[Message]] = {wire_name(cls): cls for cls in (*REQUESTS, *REPLIES, Hint)}
