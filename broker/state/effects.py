"""What goes into the state machine and what comes out of it."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from slimebus.messages import Field, Hint, Message

Table = Literal[
    "meta",
    "groups",
    "ended",
    "prompts",
    "payloads",
    "partials",
    "fields",
    "clients",
    "consumers",
    "steps",
    "freed",
    "evaluations",
    "pushes",
    "source",
]
"""meta: one record of counters. groups: every group in play. ended: dropped and dead groups. prompts, payloads and partials: opaque,
by group; fields: late ones, by group and name. clients: epochs. consumers: cursors. steps: the groups of each step; freed: those of
old steps, read only for a trainer that goes far back. evaluations: targets and results. pushes: keys of accepted pushes. source: the
state of a stateful source."""


class Address(msgspec.Struct, frozen=True, gc=False):
    """Where an answer goes: a socket identity and the id of the request."""

    peer: bytes
    request: int


class Event(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request. `body` is the message as it was encoded, `bulk` its opaque frames, `key` the name of the key it came under."""

    to: Address
    sender: str
    epoch: int
    run: str
    message: Message
    body: Any = b""
    bulk: Sequence[Any] = ()
    key: str = ""


class Save(msgspec.Struct, frozen=True, gc=False):
    """Write a record: bytes, or for `payloads` the frames to keep together."""

    table: Table
    key: str
    value: bytes | Sequence[Any]


class Delete(msgspec.Struct, frozen=True, gc=False):
    """Remove a record; absent ones are fine."""

    table: Table
    key: str


class StoredPrompt(msgspec.Struct, frozen=True, gc=False):
    """A bulk frame of a reply: the prompt record of a group."""

    group: str


class EvalPrompt(msgspec.Struct, frozen=True):
    """A bulk frame of a reply: the prompt record of a row of a held-out set."""

    dataset: str
    row: int


class StoredPayload(msgspec.Struct, frozen=True):
    """Bulk frames of a reply: the record header of a group's samples, then its fields.

    late: fields that were put after the samples; only: of all fields beyond the usual three, just these.
    """

    group: str
    late: tuple[Field, ...] = ()
    only: tuple[str, ...] | None = None


class StoredPartial(msgspec.Struct, frozen=True):
    """Bulk frames of a reply: the record header of a group's unfinished samples, then its fields."""

    group: str


class Inline(msgspec.Struct, frozen=True):
    """A bulk frame of a reply: these bytes."""

    value: bytes


Bulk = StoredPrompt | EvalPrompt | StoredPayload | StoredPartial | Inline


class Reply(msgspec.Struct, frozen=True, gc=False):
    """Answer a request, once everything saved before it is durable."""

    to: Address
    message: Message
    bulk: Sequence[Bulk] = ()


class Notify(msgspec.Struct, frozen=True):
    """Tell every subscriber that something changed."""

    hint: Hint


class Note(msgspec.Struct, frozen=True):
    """One line for the log."""

    text: str
    is_warning: bool = False


class Record(msgspec.Struct, frozen=True):
    """One row for the metrics file."""

    row: dict[str, Any]


Effect = Save | Delete | Reply | Notify | Note | Record
