"""Batches from the broker: asked for one step ahead, checked, and committed when trained.

take(s):   batch s  (fetched while s - 1 was training) -> groups
commit(s): frees the groups of every step before the newest durable checkpoint
"""

import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import numpy as np

from slimebus.config import RunConfig
from slimebus.errors import SlimebusError
from slimebus.messages import (
    NO_VERSION,
    Batch,
    BatchGroup,
    BatchReply,
    Commit,
    Fetch,
    FetchReply,
    Finish,
    Resume,
    has_failed,
)
from slimebus.samples import Sample, decode_stored, oldest_version
from slimebus.transport.client import Client

log = logging.getLogger("trainer")

WAIT_S = 15.0
FIRST_PAUSE_S, LAST_PAUSE_S = 0.05, 1.0
MAX_CHOICES = 256
"""A batch that was chosen so often before its groups could be fetched ends the trainer; each time takes a damaged group out of it."""
FETCH_TOKENS = 1_000_000
"""Tokens of one fetch: about 10 MB with logprobs and masks, far below any message bound."""


class FetchedGroup(msgspec.Struct):
    """One group of a batch: its id and its samples, failed ones left out."""

    id: str
    samples: list[Sample]


class FetchedBatch(msgspec.Struct):
    """A step's groups; version is the one being trained, next_version that of the step after, lags the staleness of each sample."""

    step: int
    version: int
    next_version: int
    groups: list[FetchedGroup]
    lags: list[int]


class Feed:
    """The trainer's side of the broker's batches; used by rank 0 alone."""

    def __init__(self, client: Client, config: RunConfig, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self.client, self.config, self.sleep = client, config, sleep
        self._trained = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="feed")
        self._ahead: dict[int, Future[FetchedBatch]] = {}

    def resume(self, step: int, version: int, lineage: str) -> None:
        """Tell the broker which timeline goes on: `step` is trained next, `version` is published first."""
        self.client.call(Resume(step=step, version=version, lineage=lineage), timeout_s=60.0)
        self._trained = step

    def take(self, step: int) -> FetchedBatch:
        """The groups of `step`; the next step's are asked for meanwhile. Raises SlimebusError for a sample beyond the bound."""
        batch = (self._ahead.pop(step, None) or self._request(step)).result()
        if step + 1 < self.config.rollout.num_rollout:
            self._ahead[step + 1] = self._request(step + 1)
        return batch

    def _request(self, step: int) -> "Future[FetchedBatch]":
        return self._thread.submit(self._load, step)

    def _load(self, step: int) -> FetchedBatch:
        for choice in range(MAX_CHOICES):
            try:
                return self._load_once(step)
            except SlimebusError as bad:
                if bad.code != "not_assigned":
                    raise
                problem = bad.text
            log.warning("the batch of step %d is chosen anew: %s", step, problem)
            self.sleep(min(LAST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(choice, 16)))
        raise SlimebusError(
            f"the batch of step {step} was chosen {MAX_CHOICES} times, each time a group of it was gone when it was fetched: {problem}; "
            "the broker's log and `slimebus buffer verify` say why",
            code="not_assigned",
        )

    def _load_once(self, step: int) -> FetchedBatch:
        reply = self._await_batch(step)
        groups: list[FetchedGroup] = []
        for part in parts(reply.groups, FETCH_TOKENS):
            groups += self._fetch(part)
        lags = [lag_of(group.id, sample, reply) for group in groups for sample in group.samples]
        return FetchedBatch(step, reply.version, reply.next_version, groups, lags)

    def _await_batch(self, step: int) -> BatchReply:
        started = said = time.monotonic()
        while True:
            ask = Batch(step=step, wait_s=WAIT_S, trained=self._trained)
            reply = self.client.call(ask, timeout_s=WAIT_S + 600.0).expect(BatchReply)
            if reply.groups:
                return reply
            if time.monotonic() - said > self.config.trainer.batch_timeout_s:
                said = time.monotonic()
                log.warning("waiting %.0f s for step %d: %s", said - started, step, reply.reason)

    def _fetch(self, wanted: list[BatchGroup]) -> list[FetchedGroup]:
        reply = self.client.call(Fetch(groups=[g.group for g in wanted]), timeout_s=120.0)
        num_frames = reply.expect(FetchReply).num_frames
        if len(num_frames) != len(wanted):
            raise SlimebusError(f"broker answered fetch of {len(wanted)} groups with {len(num_frames)}", code="protocol")
        decoded = zip(wanted, decode_stored(num_frames, reply.bulk), strict=True)
        return [FetchedGroup(one.group, [s for s in samples if not is_failed(s)]) for one, samples in decoded]

    def commit(self, step: int, *, checkpoint: int, unused: dict[str, str], metrics: dict[str, float]) -> None:
        """`step` is trained. checkpoint: the step at which the newest durable checkpoint would go on."""
        self.client.call(Commit(step=step, checkpoint=checkpoint, unused=unused, metrics=metrics), timeout_s=600.0)
        self._trained = step + 1

    def finish(self, reason: str) -> None:
        """The last step is trained."""
        self.client.call(Finish(reason=reason), timeout_s=60.0)

    def close(self) -> None:
        """Stop asking."""
        for future in self._ahead.values():
            future.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)


def is_failed(sample: Sample) -> bool:
    """True for a sample that must not be trained; the broker counts it as failed too."""
    return has_failed(sample.status, sample.reward, oldest_version(sample.versions, sample.loss_mask))


def lag_of(group: str, sample: Sample, batch: BatchReply) -> int:
    """Staleness of one sample, recomputed from its tokens: the bound of its batch holds whatever the broker was told."""
    oldest = oldest_version(sample.versions, sample.loss_mask)
    lag = 0 if oldest == NO_VERSION else batch.version - oldest
    bound = math.inf if batch.max_staleness is None else batch.max_staleness
    if lag > bound or lag < 0:
        raise SlimebusError(
            f"group {group}: a sample of version {oldest} in training of version {batch.version}; max_staleness is "
            f"{bound:g}; nothing was trained on it",
            code="too_stale",
        )
    return lag


def token_lags(versions: list[tuple[int, int]], loss_mask: np.ndarray, version: int) -> dict[int, int]:
    """How many trained tokens of a sample have which staleness in training of `version`; demonstrations have none."""
    lags: dict[int, int] = {}
    start = 0
    for made_by, length in versions:
        trained = int(loss_mask[start : start + length].sum())
        start += length
        if trained:
            lag = 0 if made_by == NO_VERSION else version - made_by
            lags[lag] = lags.get(lag, 0) + trained
    return lags


def parts(groups: list[BatchGroup], max_tokens: int) -> list[list[BatchGroup]]:
    """The groups in order, cut so that each part holds at most `max_tokens` tokens (a larger group stands alone)."""
    cut: list[list[BatchGroup]] = []
    size = 0
    for group in groups:
        if not cut or size + group.num_tokens > max_tokens:
            cut.append([])
            size = 0
        cut[-1].append(group)
        size += group.num_tokens
    return cut
