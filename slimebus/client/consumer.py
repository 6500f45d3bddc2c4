"""A consumer of groups in Python: reads each group once the workers have put it, and may put fields of its own to it.

What `read` gave is acknowledged by the next `read`, so that a consumer that dies in between gets it again when it comes back under
the same name. docs/consumers.md has an example.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from slimebus.bus.errors import SlimebusError, Unreachable
from slimebus.bus.messages import Heartbeat, HeartbeatReply, PutFields, PutFieldsReply, Read, ReadReply
from slimebus.bus.samples import Sample, decode_stored, encode_fields
from slimebus.bus.transport.client import Client
from slimebus.bus.transport.request import ReceivedReply
from slimebus.client.connect import BROKER_AWAY_S, join
from slimebus.security.credentials import credentials_at

log = logging.getLogger("slimebus.consumer")

ANSWER_S = 30.0
LAST_ANSWER_S = 10.0
LONGEST_ASK_S = 60.0
"""Of one request; a longer read is made of several."""


class ConsumedGroup(msgspec.Struct):
    """One group as it was read. `position` orders groups; (id, lease) names its samples."""

    id: str
    lease: int
    position: int
    samples: list[Sample]


class Consumer:
    """A consumer named `name` of the broker at an address. As a context manager it leaves in good order.

    keys: folder of keys with one of role consumer, or one key file. take_over: replace a living consumer of this name.
    Raises Unreachable when no broker answers within `timeout_s`, SlimebusError `name_in_use` while another consumer has the name.
    num_skipped: groups that were gone before they were read.
    """

    def __init__(
        self, broker: str, *, name: str, timeout_s: float = 120.0, keys: str | Path = "", take_over: bool = False
    ) -> None:  # fmt: skip
        self.client = Client(broker, name=name, credentials=credentials_at(Path(keys), "consumer") if keys else None)
        self.client.rejoins = True
        self.num_skipped = 0
        self.position = 0
        """Of the newest group that was read; 0 before the first read."""
        self.metrics: Callable[[], dict[str, float]] = dict
        """What each heartbeat reports, from the client's thread (docs/metrics.md)."""
        self._goes_back = False
        self._finished = threading.Event()
        try:
            welcome = join(self.client, "consumer", timeout_s, take_over=take_over)
        except SlimebusError:
            self.client.close(goodbye=False)
            raise
        self.client.keep_alive(
            welcome.heartbeat_s, lambda: Heartbeat(metrics=self.metrics()), self._on_beat, lambda lost: log.error("%s", lost.text)
        )

    def __enter__(self) -> "Consumer":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave. What the last read gave is read again next time, unless `read` was called once more."""
        self.client.close()

    @property
    def is_finished(self) -> bool:
        """True once the run is over."""
        return self._finished.is_set()

    def rewind(self, position: int) -> None:
        """Let the next read begin behind `position`, also where more was acknowledged; groups that are gone by then are skipped."""
        self.position, self._goes_back = position, True

    def groups(self, **how: Any) -> Iterator[ConsumedGroup]:
        """Every group from the durable position on, until the run is over; takes what `read` takes."""
        while True:
            found = self.read(**how)
            yield from found
            if not found and self.is_finished:
                return

    def read(
        self,
        count: int = 8,
        *,
        wait_s: float = 10.0,
        needs: Sequence[str] = (),
        extras: Sequence[str] | None = None,
        shard: tuple[int, int] = (0, 1),
    ) -> list[ConsumedGroup]:
        """Acknowledge what the last read gave, and the next groups: at most `count`, empty when none came within `wait_s` seconds.

        needs: fields they must have (reading stops at the first group that lacks one). extras: fields wanted beyond tokens, loss_mask and
        rollout_logprobs; None: all. shard (i, n): every n-th position, for n processes that share the work, each with its own name.
        """
        deadline = time.monotonic() + wait_s
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            asked = Read(
                count=count,
                wait_s=min(left_s, LONGEST_ASK_S),
                after=self.position,
                needs=list(needs),
                extras=None if extras is None else list(extras),
                shard=shard[0],
                shards=shard[1],
                back=self._goes_back,
            )
            found = self._read(asked)
            if found or self.is_finished or left_s <= LONGEST_ASK_S:
                return found

    def _read(self, asked: Read) -> list[ConsumedGroup]:
        try:
            reply = self._ask(asked)
        except Unreachable:
            if not self.is_finished:
                raise
            return []
        answer, self._goes_back = reply.expect(ReadReply), False
        if answer.finished:
            self._finished.set()
        self.num_skipped += answer.num_skipped
        self.position = answer.groups[-1].position if answer.groups else answer.position
        samples = decode_stored([group.num_frames for group in answer.groups], reply.bulk)
        return [ConsumedGroup(group.group, group.lease, group.position, own) for group, own in zip(answer.groups, samples, strict=True)]

    def put_fields(self, group: ConsumedGroup, fields: Mapping[str, Sequence[np.ndarray]]) -> bool:
        """Add fields to a group: name -> one array for each of its samples, with one entry a token, one entry, or none ([]).

        False when the group is not waiting to be trained any more. A field that is there stays as it is; another consumer's raises
        SlimebusError `field_exists`.
        """
        return self.put_all([(group, fields)])[0]

    def put_all(self, fields_of: Sequence[tuple[ConsumedGroup, Mapping[str, Sequence[np.ndarray]]]]) -> list[bool]:
        """put_fields to several groups at once, without waiting for one answer after the other."""
        sent = [
            self.client.submit(
                PutFields(group=group.id, lease=group.lease), encode_fields(fields), timeout_s=self.patience_s(BROKER_AWAY_S)
            )
            for group, fields in fields_of
        ]
        return [self._is_put(answer) for answer in sent]

    def _is_put(self, answer: Future[ReceivedReply]) -> bool:
        try:
            return answer.result().expect(PutFieldsReply).result != "gone"
        except Unreachable:
            if not self.is_finished:
                raise
            return False

    def patience_s(self, usual_s: float) -> float:
        """How long an answer is awaited: a broker that said that the run is over ends soon."""
        return min(usual_s, LAST_ANSWER_S) if self.is_finished else usual_s

    def _ask(self, asked: Read) -> ReceivedReply:
        try:
            return self.client.call(asked, timeout_s=self.patience_s(asked.wait_s + ANSWER_S))
        except SlimebusError as bad:
            if bad.code != "position":
                raise
            log.warning("%s", bad.text)
            return self.client.call(msgspec.structs.replace(asked, after=0), timeout_s=self.patience_s(asked.wait_s + ANSWER_S))

    def _on_beat(self, reply: HeartbeatReply) -> None:
        if reply.finished and not self.is_finished:
            self._finished.set()
            self.client.shorten_deadlines(LAST_ANSWER_S)
