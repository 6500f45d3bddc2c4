"""Batches from the broker: asked for one step ahead, checked, and committed when trained.

take(s):   batch s  (fetched while s - 1 was training) -> groups
           a group that cannot be trained is handed back (reject): its prompt is sampled again, and the batch is chosen anew
commit(s): frees the groups of every step before the oldest checkpoint kept
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate, islice
from typing import Any

from slimebus.bus.errors import DataError, SlimebusError, Unreachable
from slimebus.bus.messages import Batch, BatchReply, Commit, Fetch, FetchReply, Message, Reject, Resume
from slimebus.bus.samples import Sample, decode_group
from slimebus.bus.transport.client import Client
from slimebus.bus.transport.request import ReceivedReply
from slimebus.client.connect import BROKER_AWAY_S
from slimebus.config import RunConfig
from trainer.batches.batch import TrainingGroup
from trainer.batches.flatten import advantage_problems, check_sample, is_failed
from trainer.objective.objective import Objective
from trainer.session.step_batch import StepBatch, checked_lag

log = logging.getLogger("trainer")

WAIT_S = 15.0
LONGEST_SILENCE_S = 600.0
"""A wait for a batch is logged after WAIT_S seconds, then each time it has doubled, and at least this often."""
CALL_TIMEOUT_S = 60.0
MAX_REJECTED, MAX_REASON_CHARS = 100, 300
"""Of one request, which must fit one header."""
FIRST_PAUSE_S, LAST_PAUSE_S = 0.05, 1.0
MAX_CHOICES = 256
"""A batch that was chosen so often before its groups could be fetched ends the trainer; each time takes a damaged group out of it."""


class BatchClient:
    """The trainer's side of the broker's batches; used by rank 0 alone. vocab_size: token ids are below it."""

    def __init__(
        self, client: Client, config: RunConfig, vocab_size: int, objective: Objective, *, sleep: Callable[[float], object] | None = None
    ) -> None:
        self.client, self.config, self.vocab_size, self.objective = client, config, vocab_size, objective
        self._leaving = threading.Event()
        self._sleep = sleep or self._leaving.wait
        self._trained = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._next: Future[StepBatch] | None = None

    def resume(self, step: int, version: int, lineage: str, parent: str) -> None:
        """Tell the broker which timeline goes on: that of `parent`'s checkpoint. `step` is trained next, `version` published first."""
        self.client.call(Resume(step=step, version=version, lineage=lineage, parent=parent), timeout_s=BROKER_AWAY_S)
        self._trained = step

    def take_batch(self, step: int, wait_s: float | None = None) -> StepBatch | None:
        """The groups of `step`, or None when they are not here after wait_s seconds (None: however long it takes).

        Steps are taken in order: the next one's are asked for once these are here.
        """
        self._next = self._next or self._thread.submit(self._load, step)
        try:
            batch = self._next.result(wait_s)
        except TimeoutError:
            return None
        self._next = self._thread.submit(self._load, step + 1) if step + 1 < self.config.rollout.num_rollout else None
        return batch

    def _load(self, step: int) -> StepBatch:
        num_rejected = num_chosen = 0
        while True:
            try:
                batch, problems = self._load_once(step)
                if not problems:
                    batch.num_rejected = num_rejected
                    return batch
                num_rejected += self._reject(step, problems)
            except SlimebusError as bad:
                num_chosen += 1
                if bad.code != "not_assigned" or self._leaving.is_set():
                    raise
                if num_chosen == MAX_CHOICES:
                    raise SlimebusError(
                        f"the batch of step {step} was chosen {MAX_CHOICES} times, each time a group of it was gone when it was fetched: "
                        f"{bad.text}; the broker's log and `slimebus buffer verify` say why",
                        code="not_assigned",
                    ) from None
                log.warning("the batch of step %d is chosen again: %s", step, bad.text)
                self._sleep(min(LAST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(num_chosen - 1, 16)))

    def _load_once(self, step: int) -> tuple[StepBatch, dict[str, str]]:
        """The batch, and why each group of it that cannot be trained cannot."""
        reply = self._await_batch(step)
        batch, problems = StepBatch(step, reply.version, reply.next_version, [], []), {}
        wanted = [group.group for group in reply.groups]
        while wanted:  # an answer holds the first groups that were asked for, as many as fit
            records = self._fetch(wanted)
            for group, frames in zip(wanted, records, strict=False):
                try:
                    samples = self._decode(frames)
                    batch.lags += [checked_lag(sample, reply) for sample in samples]
                    batch.groups.append(TrainingGroup(group, samples))
                except SlimebusError as bad:
                    problems[group] = f"group {group}: {bad.text}"
            del wanted[: len(records)]
        return batch, problems | advantage_problems(batch.groups)

    def _decode(self, frames: Sequence[Any]) -> list[Sample]:
        """The samples of a group that are trained. Raises SlimebusError for a group that cannot be."""
        samples = [sample for sample in decode_group(frames) if not is_failed(sample)]
        if not samples:
            raise DataError("all of its samples failed, expected at least one to train")
        for index, sample in enumerate(samples):
            reads_logprobs = not self.objective.algorithm.is_supervised
            fields = self.objective.fields | (sample.extras.keys() & {"advantages"})
            rows = self.objective.row_fields
            check_sample(sample, f"sample {index}", self.vocab_size, reads_logprobs=reads_logprobs, fields=fields, row_fields=rows)
            if self.config.algorithm.kl_coef and "advantages" in sample.extras:
                why = "algorithm.kl_coef is a part of rewards and would have no effect; leave the field out, or use kl_loss_coef"
                raise DataError(f"sample {index}: it brings its own field 'advantages', but {why}")
        return samples

    def _reject(self, step: int, problems: dict[str, str]) -> int:
        """Hand the first of these groups back; how many. The others are in the batch that the broker chooses then, or in a later one."""
        first = {group: text[:MAX_REASON_CHARS] for group, text in islice(problems.items(), MAX_REJECTED)}
        for text in first.values():
            log.error("handed back to the broker, to be sampled again: %s", text)
        self._request_batch(Reject(step=step, groups=first))
        return len(first)

    def _await_batch(self, step: int) -> BatchReply:
        started = time.monotonic()
        log_at = started + WAIT_S
        while True:
            reply = self._request_batch(Batch(step=step, wait_s=WAIT_S, trained=self._trained)).expect(BatchReply)
            if reply.groups:
                return reply
            now = time.monotonic()
            if now >= log_at:
                log.info("waiting for the batch of step %d for %.0f s: %s", step, now - started, reply.reason)
                log_at = now + min(now - started, LONGEST_SILENCE_S)

    def _fetch(self, wanted: list[str]) -> list[Sequence[Any]]:
        """The bulk frames of each of the first of these groups, at least one."""
        reply = self._request_batch(Fetch(groups=wanted))
        num_frames = reply.expect(FetchReply).num_frames
        if not 0 < len(num_frames) <= len(wanted):
            raise SlimebusError(f"broker answered fetch of {len(wanted)} groups with {len(num_frames)}", code="protocol")
        ends = accumulate(num_frames)
        return [reply.bulk[end - n : end] for n, end in zip(num_frames, ends, strict=True)]

    def _request_batch(self, message: Message) -> ReceivedReply:
        """The answer, however long the broker is away: the client's log says since when. Raises Unreachable once `close` was called."""
        while True:
            try:
                return self.client.call(message, timeout_s=CALL_TIMEOUT_S)
            except Unreachable as away:
                if self._leaving.is_set():
                    raise
                log.debug("%s; asked again", away.text)

    def commit(self, step: int, *, checkpoint: int, unused: dict[str, str], metrics: dict[str, float]) -> None:
        """`step` is trained. checkpoint: the first step with samples that a trainer may need again."""
        self.client.call(Commit(step=step, checkpoint=checkpoint, unused=unused, metrics=metrics), timeout_s=BROKER_AWAY_S)
        self._trained = step + 1

    def close(self) -> None:
        """Stop asking, also a broker that does not answer."""
        self._leaving.set()
        self._thread.shutdown(wait=False, cancel_futures=True)
