"""What goes into the state machine and what comes out of it."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from slimebus.bus.messages import Field, Hint, Message

RowTable = Literal["meta", "clients", "steps", "evaluations", "consumers", "pushes", "changes", "source", "groups", "ended"]
"""Read as a whole when a broker starts."""
ValueTable = Literal["prompts", "payloads", "partials", "fields"]
"""Read record by record, each when it is asked for."""
Table = Literal[RowTable, ValueTable]
"""meta: one record of counters. groups: every group in play. ended: dropped and dead groups. prompts, payloads and partials: opaque,
by group; fields: late ones, by group and name. clients: epochs. consumers: cursors. steps: the groups of each step with samples that
are kept. evaluations: targets and results. pushes, changes: keys of accepted pushes and of changed settings. source: the state of a
stateful source."""


class Address(msgspec.Struct, frozen=True, gc=False):
    """Where an answer goes: a socket identity and the id of the request."""

    peer: bytes
    request: int


class Event(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request. `bulk`: its opaque frames; `key`: the name of the key it came under."""

    to: Address
    sender: str
    epoch: int
    run: str
    message: Message
    bulk: Sequence[Any] = ()
    key: str = ""

    @property
    def who(self) -> str:
        """Who asks, for the log: a sender chooses its name, and not the key that it connected with."""
        return f"{self.sender[:64]} (key {self.key})" if self.key else self.sender[:64]


class Write(msgspec.Struct, frozen=True, gc=False):
    """One change of the store: a value (bytes, or frames to keep together), or None to remove the record; an absent one is fine."""

    table: Table
    key: str
    value: bytes | Sequence[Any] | None


class StoredPrompt(msgspec.Struct, frozen=True, gc=False):
    """A bulk frame of a reply: the prompt record of a group."""

    group: str


class EvalPrompt(msgspec.Struct, frozen=True):
    """A bulk frame of a reply: the prompt record of a row of a held-out set."""

    dataset: str
    row: int


class StoredPayload(msgspec.Struct, frozen=True):
    """Bulk frames of a reply: the record header of a group's samples, finished ones or a partial, then its fields.

    num_frames: of the record, late fields not counted; late: fields that were put after the samples; only: of all fields beyond the
    usual three, just these.
    """

    group: str
    num_frames: int
    late: tuple[Field, ...] = ()
    only: tuple[str, ...] | None = None
    table: Table = "payloads"


class Inline(msgspec.Struct, frozen=True):
    """A bulk frame of a reply: these bytes."""

    value: bytes


Bulk = StoredPrompt | EvalPrompt | StoredPayload | Inline


class Reply(msgspec.Struct, frozen=True, gc=False):
    """Answer a request, once everything saved before it is durable. The process adds the document to a StatusReply."""

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


class StepHistory(msgspec.Struct, frozen=True):
    """How the groups of a step came to be trained. groups: id -> number of samples, and the phases it came into and when.

    now: the time of the commit; train_s, after_s: what the trainer says it took to train the step, and what it did after that.
    """

    step: int
    now: float
    train_s: float
    after_s: float
    groups: dict[str, tuple[int, list[tuple[str, float]]]]


Effect = Write | Reply | Notify | Note | Record | StepHistory
