"""The groups that a worker has leased: each is sampled and put, or its lease is given back with what became of it.

leased --make--> samples --------put-------> broker
            '--> dropped, failed, cut off --give back--> broker
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rollout.engines.dispatch import Dispatch
from rollout.samples import partials
from rollout.samples.plugins import LEASED, PluginError, failure
from rollout.worker.groups import Dropped, GroupMaker
from slimebus.bus.errors import HookError, SlimebusError
from slimebus.bus.messages import GiveBack, LeasedGroup, Put, PutReply
from slimebus.bus.sample_table import check_group
from slimebus.bus.samples import encode_group
from slimebus.bus.transport.client import Client
from slimebus.config.schema import RolloutConfig
from slimebus.telemetry.metrics import BusyMeter
from slimebus.telemetry.spans import Spans

log = logging.getLogger("rollout")

PUT_TIMEOUT_S = 600.0
GIVE_BACK_TIMEOUT_S = 30.0
MAX_REASON_BYTES = 500
REFUSED_AS_IT_IS = ("bad_samples", "protocol", "too_large")
"""Codes of puts that would be refused again: a failed attempt."""
REFILL_S = 0.005
"""What it takes to lease a group and send it to an engine that has room: 4 ms beside a busy engine on two cores."""
RECALLED_HOOK = (
    "is recalled, and what its hook began is begun anew: sessions that take longer than broker.max_staleness steps never end; "
    "raise that bound, or lower rollout.over_sampling_batch_size"
)
FAILED_ALIKE = 16
"""Least groups in a row that fail alike and end the worker; else as many as it samples at once."""


class Counts(msgspec.Struct):
    """What this worker did since it started."""

    groups: int = 0
    samples: int = 0
    filtered: int = 0
    failed: int = 0
    discarded: int = 0
    begun_anew: int = 0


@dataclass
class Attempt:
    """One leased group at work."""

    leased: LeasedGroup
    task: "asyncio.Task[None]"
    is_sampled: bool = False
    is_being_put: bool = False
    recall: "asyncio.Task[None] | None" = None
    reason: str = "worker left"
    """Why it is given back when it is cancelled."""
    num_tokens: int = 0
    """Sampled since it was leased."""


class Attempts:
    """All leased groups of a worker, by lease. give_up is called with what no later group can succeed after."""

    def __init__(
        self,
        config: RolloutConfig,
        client: Client,
        maker: GroupMaker,
        engines: Dispatch,
        *,
        max_group_bytes: int,
        spans: Spans,
        give_up: Callable[[BaseException], None],
    ) -> None:
        """max_group_bytes: of all frames of a put; 0: no limit."""
        self.config, self.client, self.maker, self.engines = config, client, maker, engines
        self.max_group_bytes, self.spans, self.give_up, maker.spans = max_group_bytes, spans, give_up, spans
        self.running: dict[int, Attempt] = {}
        self.ended = asyncio.Event()
        """Set whenever one is sampled or ends."""
        self.counts = Counts()
        self.busy = BusyMeter()
        self._failed_alike = ("", 0)

    @property
    def num_samples(self) -> int:
        """Being sampled now, and, beyond as many as are sampled at once, those that wait for their rewards."""
        waiting = sum(attempt.leased.num_samples for attempt in self.running.values() if attempt.is_sampled)
        sampling = sum(attempt.leased.num_samples for attempt in self.running.values() if not attempt.is_sampled)
        return sampling + max(0, waiting - self.config.max_running_groups * self.config.n_samples_per_prompt)

    def begin_attempt(self, leased: LeasedGroup, record: bytes, partial: Sequence[Any]) -> None:
        """Sample this group and tell the broker, in a task. partial: frames of samples that another worker began."""
        attempt = Attempt(leased, asyncio.create_task(self._run_attempt(leased, record, partial)))
        self.running[leased.lease] = attempt
        self.busy.enter()
        attempt.task.add_done_callback(lambda done: self._on_attempt_done(leased.lease, done))

    def _on_attempt_done(self, lease: int, done: "asyncio.Task[None]") -> None:
        if not done.cancelled() and (fault := done.exception()) is not None:  # ours, not a plug-in's: end loudly
            self.give_up(fault)
        del self.running[lease]
        self.busy.leave()
        self.ended.set()

    async def _on_sampled(self, lease: int) -> None:
        self.running[lease].is_sampled, is_awaited = True, not self.ended.is_set()
        self.ended.set()
        if is_awaited:  # an engine has room: filling it comes before the work on these samples
            await asyncio.sleep(REFILL_S)

    def abort(self, lease: int, level: int, why: str, reason: str = "worker left") -> None:
        """Stop sampling a group that the broker wants no more. What is being put stays: that crosses the heartbeat that names its lease."""
        attempt = self.running.get(lease)
        if attempt is not None and not attempt.is_being_put:
            log.log(level, "lease %d %s", lease, why)
            attempt.reason = reason
            attempt.task.cancel()

    def recall(self, lease: int) -> None:
        """Hand back a group that the broker wants now, with what there is of it: it is continued under a later version."""
        attempt = self.running.get(lease)
        if attempt is None or attempt.is_being_put or attempt.recall is not None or attempt.task.cancelling():
            return
        if self.maker.continues(attempt.leased):
            attempt.recall = asyncio.create_task(self.maker.recall(attempt.leased.group))
        else:
            self.counts.begun_anew += 1
            number, log_level = self.counts.begun_anew, logging.WARNING if self.counts.begun_anew.bit_count() == 1 else logging.INFO
            self.abort(lease, log_level, f"{RECALLED_HOOK} (so far {number} groups)", "recalled and begun anew")

    async def hand_over(self) -> None:
        """Cut off what is being sampled, so that another worker continues it; what takes too long goes on here."""
        open_ = [attempt.task for attempt in self.running.values() if self.maker.continues(attempt.leased)]
        if not open_:
            return
        try:
            async with asyncio.timeout(self.config.drain_timeout_s):
                await self.engines.leave()
                await asyncio.gather(*open_, return_exceptions=True)
        except TimeoutError:
            num_left = sum(not task.done() for task in open_)
            if num_left:
                log.warning("%d groups were not handed over within %.1f s", num_left, self.config.drain_timeout_s)
        except SlimebusError as bad:
            log.warning("groups are given back unfinished: %s", bad.text)

    async def cancel(self) -> None:
        """Give everything back as it was."""
        tasks = [attempt.task for attempt in self.running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_attempt(self, leased: LeasedGroup, record: bytes, partial: Sequence[Any]) -> None:
        LEASED.set(leased)
        attempt = self.running[leased.lease]
        try:
            try:
                with self.spans("sample", group=leased.group, kind=leased.kind):
                    samples = await self.maker.make_group(leased, record, partial, lambda: self._on_sampled(leased.lease))
            finally:
                attempt.num_tokens = self.engines.forget(leased.group)  # before anyone can lease it again
            frames = encode_group(samples)
            check_group(frames, num_samples=leased.num_samples, max_bytes=self.max_group_bytes)
        except partials.Unfinished as unfinished:
            await self._give_back_unfinished(leased, unfinished)
        except Dropped as why:
            self.counts.filtered += 1
            await self._give_back(leased, "drop", str(why), num_tokens=why.num_tokens, rewards=why.rewards)
        except SlimebusError as bad:
            if bad.retryable:
                log.warning("group %s: %s", leased.group, bad.text)
                await self._give_back(leased, "requeue", bad.text)
            else:
                await self._fail(leased, bad)
        except Exception as bad:  # what a plug-in left behind broke our own code: this group alone fails
            log.exception("group %s", leased.group)
            await self._fail(leased, failure(f"group {leased.group}", bad))
        except asyncio.CancelledError:
            await self._give_back(leased, "requeue", attempt.reason, timeout_s=1.0)
            raise
        else:
            await self._put(leased, frames, len(samples))

    async def _put(self, leased: LeasedGroup, frames: list[bytes], num_samples: int) -> None:
        self.running[leased.lease].is_being_put = True
        put = Put(group=leased.group, lease=leased.lease, lineage=self.engines.lineage)
        try:
            with self.spans("put", group=leased.group):
                reply = (await self.client.ask(put, frames, timeout_s=PUT_TIMEOUT_S)).expect(PutReply)
        except SlimebusError as bad:
            self.counts.discarded += 1
            if bad.code in REFUSED_AS_IT_IS:
                await self._fail(leased, SlimebusError(f"not put: {bad.text}", code=bad.code))
            else:
                log.error("group %s not put: %s", leased.group, bad.text)
            return
        self._failed_alike = ("", 0)
        if reply.result == "discarded":
            self.counts.discarded += 1
            log.info("group %s discarded: %s", leased.group, reply.reason)
        else:
            self.counts.groups += 1
            self.counts.samples += num_samples
            self.counts.filtered += reply.reason.startswith("filtered")

    async def _fail(self, leased: LeasedGroup, bad: SlimebusError) -> None:
        """A failed attempt. The worker ends when as many in a row as it samples at once failed in the same way: all others would, too."""
        log.error("group %s: %s", leased.group, bad.text)
        self.counts.failed += 1
        await self._give_back(leased, "fail", bad.text)
        alike = bad.alike if isinstance(bad, PluginError) else type(bad).__name__
        count = self._failed_alike[1] + 1 if alike == self._failed_alike[0] else 1
        self._failed_alike = (alike, count)
        if count >= max(FAILED_ALIKE, self.config.max_running_groups):
            self.give_up(HookError(f"{count} groups in a row failed alike and none succeeded; the last one: {bad.text}"))

    async def _give_back_unfinished(self, leased: LeasedGroup, unfinished: partials.Unfinished) -> None:
        # What a hook does around its samples cannot be continued, nor an evaluation: that one starts again.
        kept = unfinished.responses if self.maker.continues(leased) else []
        reason = "recalled" if self.running[leased.lease].recall is not None else "worker left"
        if unfinished.num_new is not None:
            reason = f"no end within generate_timeout_s = {self.config.generate_timeout_s:g} s"
            if not unfinished.num_new:
                self.counts.failed += 1
                return await self._give_back(leased, "fail", f"{reason}, and no token")
        back, frames = partials.give_back_message(leased, self.engines.lineage, kept, reason)
        if 0 < self.max_group_bytes < sum(map(len, frames)):
            back, frames = partials.give_back_message(leased, self.engines.lineage, [], reason)
        await self._send_back(back, frames, timeout_s=self.config.drain_timeout_s)

    async def _give_back(
        self, leased: LeasedGroup, outcome: str, reason: str, *, timeout_s: float = GIVE_BACK_TIMEOUT_S, **about: Any
    ) -> None:
        """about: more fields of the message."""
        about = {"num_tokens": self.running[leased.lease].num_tokens, **about}
        await self._send_back(without_samples(leased, outcome, reason, **about), [], timeout_s=timeout_s)

    async def _send_back(self, back: GiveBack, frames: list[bytes], *, timeout_s: float) -> None:
        try:
            await self.client.ask(back, frames, timeout_s=timeout_s)
        except SlimebusError as bad:
            log.warning("group %s not given back (its lease will run out): %s", back.group, bad.text)


def without_samples(leased: LeasedGroup, outcome: str, reason: str, **about: Any) -> GiveBack:
    """What gives a group back that yields no samples. about: more fields of the message."""
    reason = reason.encode(errors="replace")[:MAX_REASON_BYTES].decode(errors="ignore")
    return GiveBack(group=leased.group, lease=leased.lease, outcome=outcome, reason=reason, **about)
