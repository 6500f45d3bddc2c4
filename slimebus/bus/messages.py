"""Every message on the bus, typed. docs/protocol.md describes each field, its range and its sequence.

A message is the `body` of an envelope; its type on the wire is the class name in snake case. Unknown fields of a newer
peer are ignored, an unknown type is answered with an error. Arrays never stand in a message: they are raw frames behind
the header, each described by a `Field` of the table before them (slimebus/bus/sample_table.py).

    worker    hello -> lease* -> (heartbeat) -> put | give_back -> ... -> goodbye
    trainer   hello -> resume -> publish -> (batch -> fetch* -> [reject] -> publish -> commit)* -> finish
    consumer  hello -> (read -> put_fields*)* -> goodbye
    client    hello -> status | evaluate | push | set | command
"""

import math
import re
from functools import cache
from typing import Annotated

import msgspec
from msgspec import Meta

PROTOCOL_VERSION = 1
"""The newest version of the protocol that this release speaks."""
OLDEST_PROTOCOL = 1
"""The oldest version that it still understands."""
LEASE_SUM_MODULUS = 1 << 63
"""Of the sum of lease ids in a heartbeat."""
NO_VERSION = -1
"""The version of a token that no policy made: a prompt, a tool's answer, a demonstration."""

MAX_BATCH_SIZE = 2048
MAX_GROUP_BYTES = 80
"""Of the id of a group, in UTF-8; those of files are shorter. A batch reply, a fetch and a commit name so many groups in one header."""
MAX_WAIT_S = 600.0
"""The longest that a request may wait for its answer."""

Scalar = str | int | float | bool | None
Count = Annotated[int, Meta(ge=0, le=1 << 40)]
"""Of steps, groups, samples, tokens or positions; the decoder refuses what lies outside, here and in the types below."""
Positive = Annotated[int, Meta(ge=1, le=1 << 40)]
Version = Annotated[int, Meta(ge=NO_VERSION, le=1 << 40)]
Start = Annotated[int, Meta(ge=0, le=1 << 31)]
"""A step or version to go on from: no run gets from here to the limit of those."""
Id = Annotated[int, Meta(ge=0, le=LEASE_SUM_MODULUS - 1)]
"""A lease, an epoch or a generation of keys."""
Wait = Annotated[float, Meta(ge=0, le=MAX_WAIT_S)]
"""Seconds; to wait longer, ask again."""
Lineage = Annotated[str, Meta(max_length=128)]
Digest = Annotated[str, Meta(max_length=128)]
Publishers = Annotated[list[str], Meta(max_length=1024)]
FieldNames = Annotated[list[Annotated[str, Meta(max_length=64)]], Meta(max_length=32)]


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
    another instance of the same name gets a new epoch, and fences the older one with its first request under it.
    `protocol` and `oldest` are the newest and the oldest protocol version that the client speaks, `release` is its software's.
    Their defaults are version 1 in every release, so that what is left out never changes its meaning.
    `settings` are those on which the processes of a run must agree: dotted name -> value as JSON.
    `take_over`: replace a living process of this name and role. `host`, `pid`: where this process is, for messages.
    """

    role: str
    instance: str
    protocol: Count = 1
    oldest: Count = 1
    release: str = ""
    settings: dict[str, str] = {}
    take_over: bool = False
    host: Annotated[str, Meta(max_length=255)] = ""
    pid: Count = 0


class Welcome(Message):
    """What a client must know to take part. `lineage` is empty and `version` NO_VERSION before the first publish.

    `protocol` is the version that both sides speak from now on. `digest` is that of the version, over the tensors of all publishers.
    `differences` is a sentence for each of the hello's settings that differs from the run's.
    """

    run: str
    epoch: Id
    heartbeat_s: float
    lineage: Lineage = ""
    version: Version = NO_VERSION
    publishers: Publishers = []
    digest: Digest = ""
    hints: str = ""
    max_message_bytes: Count = 0
    protocol: Count = 1
    differences: list[str] = []


class EngineReport(Message):
    """One engine of a worker. model: its name, empty for the policy. state: starting, syncing, serving, sick or draining.

    version: that it verifiably serves. running: requests at it. is_owned: started by the worker, and not attached.
    """

    url: str
    model: str = ""
    state: str = ""
    version: Version = NO_VERSION
    running: Count = 0
    is_owned: bool = False


class Command(Message):
    """Have a worker attach an engine, detach one, or drain: leave in good order. `worker`: empty where there is only one.

    The worker gets it with its next heartbeat reply. Repeating the same `key` asks what became of it.
    """

    key: Annotated[str, Meta(max_length=64)]
    action: Annotated[str, Meta(pattern="^(attach|detach|drain)$")]
    worker: str = ""
    url: Annotated[str, Meta(max_length=1024)] = ""


class CommandReply(Message):
    """done: the worker has done it, or it `failed`; `text` says more. Else the worker (`worker`) is at it."""

    done: bool = False
    failed: bool = False
    text: str = ""
    worker: str = ""


class Heartbeat(Message):
    """I am alive, and work on `num_leases` leases with ids that sum up to `lease_sum` modulo 2^63; where the broker agrees they live on.

    leases: all of them, after a reply that asked for the list; None: not listed. `serving` is the verified version (NO_VERSION: none).
    `outcomes`: of commands, by key. blocked_s: for how long one call has blocked the event loop of this process, `blocked_at` FILE:LINE;
    0: it does not.
    """

    state: str = ""
    lineage: Lineage = ""
    serving: Version = NO_VERSION
    num_leases: Count = 0
    lease_sum: Id = 0
    leases: list[Id] | None = None
    metrics: dict[str, float] = {}
    engines: Annotated[list[EngineReport], Meta(max_length=256)] = []
    outcomes: Annotated[dict[Annotated[str, Meta(max_length=64)], CommandReply], Meta(max_length=64)] = {}
    blocked_s: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    blocked_at: str = ""


class HeartbeatReply(Message):
    """The truth that hints may have lost. `finished`: the run is over, leave.

    list_leases: the broker counts other leases; the next heartbeat, at once, lists them all. Of listed leases: `lost` are held no more,
    `surplus` neither, as their groups can be in no step any more. `recalled`: of all leases, those to be given back now, as a partial
    where that can be; the broker takes them back itself after its lease time. `hints`: as in the welcome; a restarted broker may have
    another address. `commands`: those without a reported outcome. `time`: the broker's clock when it answered, seconds since the
    epoch; 0: not said. `keys`: the generation of the allow-list, as in the answer to `keys`; 0: no keys.
    """

    lineage: Lineage = ""
    version: Version = NO_VERSION
    publishers: Publishers = []
    digest: Digest = ""
    list_leases: bool = False
    lost: list[Id] = []
    surplus: list[Id] = []
    recalled: list[Id] = []
    finished: bool = False
    hints: str = ""
    commands: list[Command] = []
    time: float = 0.0
    keys: Id = 0


class Goodbye(Message):
    """I leave in good order; what I still lease is queued again at once."""


class Hint(Message):
    """Published on the XPUB socket: something changed; may be lost.

    recalls: how often this broker has recalled leases; a worker that sees another number sends a heartbeat at once, to learn which.
    """

    lineage: Lineage = ""
    version: Version = NO_VERSION
    publishers: Publishers = []
    digest: Digest = ""
    finished: bool = False
    recalls: Count = 0


# --- samples ------------------------------------------------------------------------------------------------------


class Field(Message):
    """One array per sample of a group, concatenated (C order, little-endian) into one bulk frame.

    `shapes[i]` is the shape of sample i; empty: every sample has the shape [T], one entry a token.
    """

    name: str
    dtype: str
    shapes: list[list[int]] = []


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

    want: Positive
    wait_s: Wait
    lineage: Lineage = ""
    serving: Version = NO_VERSION
    needs_weights: bool = True
    takes_partials: bool = False


class LeasedGroup(Message):
    """A right to one group until `deadline_s` seconds from now, extended by heartbeats. kind: train | eval.

    Its prompt record (msgpack map: prompt, label, metadata) is the reply's bulk frame at the same index. `partial_frames`: so
    many frames after all prompt records, in the order of the groups, hold samples to continue: a `GiveBack`, then its fields.
    `lineage`: what the put must name; `version`: what its worker serves, of that lineage. Empty for samples made without the policy.
    """

    group: str
    lease: Id
    num_samples: Count
    deadline_s: float
    kind: str = "train"
    dataset: str = ""
    sampling: dict[str, Scalar | list[str | int]] = {}
    partial_frames: Count = 0
    lineage: Lineage = ""
    version: Version = NO_VERSION


class LeaseReply(Message):
    """The groups granted, oldest prompt first; empty when the wait ran out (`reason` says what was waited for).

    finished: the run is over, leave.
    """

    groups: list[LeasedGroup] = []
    reason: str = ""
    finished: bool = False


class Put(Message):
    """The finished samples of a leased group. Bulk frames: their table, then one per field (slimebus/bus/sample_table.py).

    Idempotent by lease. What is refused as `bad_samples` ends the lease as a failed attempt.
    """

    group: str
    lease: Id
    lineage: Lineage


class PutReply(Message):
    """result: accepted (durable), duplicate (this lease was put before) or discarded (`reason`: the lease was lost, ...)."""

    result: str
    reason: str = ""


class GiveBack(Message):
    """A leased group that yields no samples. outcome: requeue (try again) | drop (filtered out) | fail (counts as a failed attempt)
    | partial (try again from these samples: finished ones, and `aborted` ones to continue by token id).

    Only a partial has bulk frames, as in a put; `lineage` is that of its lease. num_tokens: made, and wasted unless it is a partial.
    rewards: of its samples, None for those that failed; a source of prompts may want to know them.
    """

    group: str
    lease: Id
    outcome: Annotated[str, Meta(pattern="^(requeue|drop|fail|partial)$")]
    reason: str
    num_tokens: Count = 0
    rewards: list[float | None] = []
    lineage: Lineage = ""


# --- training -----------------------------------------------------------------------------------------------------


class Resume(Message):
    """The trainer's timeline: it will train `step` next, in a new `lineage` with `version` as its first publish.

    Batches of later steps are ready again; samples made by versions that this timeline never had are queued as prompts. A step
    before the oldest checkpoint kept is refused, but for 0, which begins the run anew. parent: the lineage that saved the checkpoint;
    steps that another one trained in their place are not taken for its own. "": the newest lineage.
    """

    step: Start
    version: Start
    lineage: Annotated[str, Meta(min_length=1, max_length=128)]
    parent: Annotated[str, Meta(max_length=128)] = ""


class Publish(Message):
    """Version `version` of `lineage` is complete and can be pulled from `publishers` (addresses of weight servers).

    `digest`: of the whole version, not empty; workers serve nothing else as this version.
    """

    lineage: Lineage
    version: Version
    publishers: Publishers
    digest: Annotated[str, Meta(min_length=1, max_length=128)]


class Batch(Message):
    """The groups of `step`: the same answer until it is committed. Parked at most `wait_s` seconds.

    `trained`: the first step that this trainer has not committed; a broker that knows of fewer lost writes in a power cut and says so.
    """

    step: Start
    wait_s: Wait
    trained: Start = 0


class BatchGroup(Message, array_like=True):
    """One group of a batch; sizes are sums over its samples, oldest_version the oldest over their trainable tokens.

    A msgpack array in this order, not a map: a batch of 2,048 groups must fit one header.
    """

    group: str
    num_samples: Count
    num_tokens: Count
    oldest_version: Version = NO_VERSION


class BatchReply(Message):
    """Empty `groups`: not ready within the wait, and `reason` says what it waits for. `version` is the one being trained.

    next_version: what the step after this one trains; publish it before the commit when it is above `version`.
    max_staleness: the bound that these groups were chosen under; None is unbounded.
    """

    step: Count
    version: Version = NO_VERSION
    groups: list[BatchGroup] = []
    reason: str = ""
    next_version: Version = NO_VERSION
    max_staleness: Count | None = None


class Fetch(Message):
    """The samples of these assigned groups; the trainer keeps the sum of their sizes below the message bound."""

    groups: list[str]


class FetchReply(Message):
    """For each group, `num_frames` bulk frames: the table of its samples, then one frame per field."""

    num_frames: list[Count] = []


class Commit(Message):
    """`step` was trained. unused: group -> reason, for groups that gave no gradient. Idempotent.

    checkpoint: the first step that the oldest checkpoint kept has yet to train; groups of earlier steps are freed.
    """

    step: Count
    checkpoint: Count = 0
    unused: dict[str, str] = {}
    metrics: dict[str, float] = {}


class Reject(Message):
    """These groups of the batch of `step` cannot be trained: group -> reason. Each counts as a failed attempt; its prompt is sampled again.

    The batches of `step` and of later steps are chosen anew: what was fetched of them is asked for again. Idempotent.
    """

    step: Count
    groups: dict[str, str]


class Finish(Message):
    """The last step is trained: the broker asks workers to leave, and answers until they have left."""

    reason: str = ""


# --- consumers ----------------------------------------------------------------------------------------------------


class Read(Message):
    """The next groups behind position `after`, which is thereby acknowledged with all before it. Parked at most `wait_s` seconds.

    needs: fields that a group must have; reading goes no further than the first group that lacks one. extras: of the fields beyond
    tokens, loss_mask and rollout_logprobs, just these (None: all). shard, shards: only positions p with p % shards == shard.
    back: begin behind `after` also where more was acknowledged, for a consumer that goes on from a checkpoint of its own.
    """

    count: Positive
    wait_s: Wait
    after: Count = 0
    needs: FieldNames = []
    extras: FieldNames | None = None
    shard: Count = 0
    shards: Positive = 1
    back: bool = False


class ReadGroup(Message):
    """One group of a read; sizes and versions as in a batch. `lease` names its samples when fields are put to it."""

    group: str
    lease: Id
    position: Count
    num_frames: Count
    num_samples: Count
    num_tokens: Count
    oldest_version: Version = NO_VERSION


class ReadReply(Message):
    """For each group, `num_frames` bulk frames: the table of its samples, then one frame per field, late ones last.

    position: the cursor, up to which everything is acknowledged. num_skipped: positions before the last group given that are gone.
    """

    groups: list[ReadGroup] = []
    position: Count = 0
    num_skipped: Count = 0
    reason: str = ""
    finished: bool = False


class PutFields(Message):
    """More fields of a group that waits to be trained. Bulk frames: a msgpack list of `Field`, then one per field, in order.

    Idempotent by (group, lease, name).
    """

    group: str
    lease: Id


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
    """Ask for the allow-list: the keys that may pull weights. `have`: the generation that the asker knows; it is not sent again."""

    have: Id = 0


class KeysReply(Message):
    """Bulk frame 0, when the list is another than `have`: JSON, one [public key, name, role] for each key. generation 0: no keys."""

    generation: Id = 0


class Evaluate(Message):
    """Queue an evaluation of the newest version on `datasets` (empty: all). Repeating the same `key` starts nothing new."""

    key: str
    datasets: list[str] = []
    wait_s: Wait = 0.0


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

    step: Count
    changed: dict[str, tuple[Scalar, Scalar]] = {}
    settings: dict[str, Scalar] = {}


class Edit(Message):
    """Change groups by hand. action: drop (take out of the run) | replay (try a dead or dropped group again, failures forgotten)."""

    action: Annotated[str, Meta(pattern="^(drop|replay)$")]
    groups: list[str]
    reason: str = ""


class Import(Message):
    """Take in one group from a file: bulk frame 0 is its prompt record, then the frames of a put, where it has samples.

    Without samples, or with samples of versions that this run never had, the prompt is queued. Repeating it changes nothing.
    """

    group: str
    lineage: Lineage = ""


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

    accepted: Count
    duplicate: Count = 0
    first: str = ""
    waiting: Count = 0


@cache
def wire_name(cls: type[Message]) -> str:
    """The type on the wire of a message class: `HeartbeatReply` is `heartbeat_reply`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


REQUESTS = (
    *(Hello, Heartbeat, Goodbye, Lease, Put, GiveBack, Resume, Publish, Batch, Fetch, Reject, Commit, Finish),
    *(Read, PutFields, Status, Keys, Evaluate, Set, Push, Edit, Import, Command),
)
REPLIES = (
    *(Ok, Error, Welcome, HeartbeatReply, LeaseReply, PutReply, BatchReply, FetchReply),
    *(ReadReply, PutFieldsReply, StatusReply, KeysReply, EvaluateReply, SetReply, PushReply, EditReply, CommandReply),
)
TYPES: dict[str, type[Message]] = {wire_name(cls): cls for cls in (*REQUESTS, *REPLIES, Hint)}
