"""Push prompts into a run while it goes on: `PromptClient("tcp://broker1:5555").push([{"prompt": "2+2=", "label": "4"}, "or text"])`."""

import logging
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from slimebus.bus.errors import DataError, SlimebusError
from slimebus.bus.messages import Push, PushReply
from slimebus.client.connect import process_name
from slimebus.prompts.prompt_record import PromptKeys, record_of
from slimebus.security.credentials import credentials_at

log = logging.getLogger("slimebus")

KEYS = PromptKeys(tools="tools")
BATCH_PROMPTS = 2048
BATCH_BYTES = 4 * 1024 * 1024
ANSWER_S = 5.0


class Pushed(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a push. accepted and duplicate: prompts that were new, and that a push of the same key brought before.

    ids: the group id of each prompt, in order. waiting: pushed prompts that are not sampled yet.
    """

    accepted: int = 0
    duplicate: int = 0
    ids: list[str] = []
    waiting: int = 0


class PromptClient:
    """A client that pushes prompts to the broker at an address. Each prompt is taken once, also after lost messages and restarts.

    timeout_s: how long one batch may take, the time included in which the broker has no room.
    keys: folder of keys with one of role client, or one key file. run: the name of the run that is meant; empty: whichever is there.
    """

    def __init__(self, broker: str, *, timeout_s: float = 60.0, keys: str | Path = "", run: str = "") -> None:
        from slimebus.bus.transport.client import Client  # zmq and asyncio: no --help needs them

        self.timeout_s = timeout_s
        credentials = credentials_at(Path(keys), "client") if keys else None
        self._client = Client(broker, name=process_name("prompts"), credentials=credentials)
        self._client.run, self._client.rejoins = run, True

    def push(self, prompts: Iterable[str | Mapping[str, Any]], *, key: str = "", front: bool = False) -> Pushed:
        """Push prompts: text, or maps of prompt, label, metadata and tools. Returns once all are as durable as the broker promises.

        key: the same key and prompts again add nothing, so a push that failed half-way can be repeated; empty: a random one.
        front: before the prompts that were pushed without it. Raises DataError for a prompt that is none (nothing of its batch is
        pushed), Unreachable, or SlimebusError `busy`, `push_key`, `finished`.
        """
        key = key or secrets.token_hex(8)
        batches = batches_of(_record(number, prompt) for number, prompt in enumerate(prompts))
        return sum_pushes([self.push_batch(batch, key=f"{key}/{number}", front=front) for number, batch in enumerate(batches)])

    def push_batch(self, records: list[bytes], *, key: str, front: bool = False) -> Pushed:
        """One push of at most 4096 records, sent until it is answered."""
        deadline, is_logged = time.monotonic() + self.timeout_s, False
        while True:
            patience = min(ANSWER_S, max(0.1, deadline - time.monotonic()))
            try:
                return self._call(Push(key=key, front=front), records, patience)
            except SlimebusError as problem:
                if not problem.retryable or time.monotonic() >= deadline:
                    raise
                if not is_logged:
                    is_logged = True
                    log.warning("waiting up to %.0f s: %s", self.timeout_s, problem.text)

    def _call(self, push: Push, records: list[bytes], timeout_s: float) -> Pushed:
        if not self._client.epoch:
            self._client.join("client", timeout_s=timeout_s)
        reply = self._client.call(push, records, timeout_s=timeout_s).expect(PushReply)
        lane, _, first = reply.first.partition("/")
        ids = [f"{lane}/{int(first) + offset}" for offset in range(len(records))]
        return Pushed(accepted=reply.accepted, duplicate=reply.duplicate, ids=ids, waiting=reply.waiting)

    def close(self) -> None:
        """Leave."""
        self._client.close()

    def __enter__(self) -> "PromptClient":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def sum_pushes(parts: Sequence[Pushed]) -> Pushed:
    """Several pushes as one."""
    return Pushed(
        accepted=sum(part.accepted for part in parts),
        duplicate=sum(part.duplicate for part in parts),
        ids=[name for part in parts for name in part.ids],
        waiting=parts[-1].waiting if parts else 0,
    )


def batches_of(records: Iterable[bytes]) -> Iterator[list[bytes]]:
    """The records in batches that depend on nothing but them: at most 2048 prompts and, but for a single one, 4 MiB."""
    batch: list[bytes] = []
    size = 0
    for record in records:
        if batch and (len(batch) >= BATCH_PROMPTS or size + len(record) > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(record)
        size += len(record)
    if batch:
        yield batch


def _record(number: int, prompt: str | Mapping[str, Any]) -> bytes:
    fields = {"prompt": prompt} if isinstance(prompt, str) else dict(prompt)
    try:
        if unknown := fields.keys() - set(msgspec.structs.asdict(KEYS).values()):
            raise DataError(f"unknown key {min(unknown)!r}; expected prompt, label, metadata, tools")
        return record_of(fields, KEYS)
    except DataError as bad:
        raise DataError(f"prompt {number}: {bad.text}") from None
