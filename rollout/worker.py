"""A rollout worker: lease groups, sample and reward them, put them; follow the weights; leave without losing anything.

JOINING -> SYNCING -> SERVING -> DRAINING
              ^----------'  (an engine ended, or the lineage changed)
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollout import partials
from rollout.engines import Engines
from rollout.groups import Dropped, GroupMaker
from rollout.relay import Relay
from rollout.tokenizer import Tokenizer
from rollout.weight_sync import WeightSync
from slimebus.config import Resolved
from slimebus.errors import HookError, ProtocolError, SlimebusError
from slimebus.messages import (
    NO_VERSION,
    GiveBack,
    Heartbeat,
    HeartbeatReply,
    Hint,
    Lease,
    LeasedGroup,
    LeaseReply,
    Put,
    PutReply,
    Welcome,
)
from slimebus.metrics import BusyMeter, MetricsWriter
from slimebus.samples import encode_group
from slimebus.spans import Spans
from slimebus.transport.client import Client
from slimebus.weights.cores import num_threads

log = logging.getLogger("rollout")

LEASE_WAIT_S = 10.0
PUT_TIMEOUT_S = 600.0
WATCH_S = 1.0


class Counts(msgspec.Struct):
    """What this worker did since it started."""

    groups: int = 0
    samples: int = 0
    filtered: int = 0
    failed: int = 0
    discarded: int = 0


class Worker:
    """One worker process. `run` returns when the run is finished or `stop` was called."""

    def __init__(self, resolved: Resolved, client: Client, *, name: str) -> None:
        self.resolved, self.config, self.client, self.name = resolved, resolved.config, client, name
        self.model_dir: Path = resolved.model_dir
        self.engines = self._make_engines()
        self.sync: WeightSync | None = None
        self.relay: Relay | None = None
        self.counts = Counts()
        self.busy = BusyMeter()
        self.running: dict[int, asyncio.Task[None]] = {}
        self.samples_of: dict[int, int] = {}
        self.draining: dict[int, asyncio.Task[None]] = {}
        self.putting: set[int] = set()
        self.writer = MetricsWriter(resolved.run_dir / "metrics", f"rollout-{name}")
        self.spans = Spans(resolved.run_dir / "metrics", name)
        self.finished = False
        self._failure: BaseException | None = None
        self._stopping = asyncio.Event()
        self._slot_free = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def _make_engines(self) -> Engines | None:
        c = self.config
        if c.engine.engine == "none":
            return None
        logs = self.resolved.run_dir / "logs"
        return Engines(c.engine, self.model_dir, logs, name=self.name, sglang_args=c.sglang, seed=c.seed)

    # --- life ---

    async def run(self, welcome: Welcome, tokenizer: Tokenizer) -> None:
        """Serve until the broker says the run is finished, or stop() is called. Raises what made it fail."""
        self.maker = GroupMaker(self.config, self.resolved.base, tokenizer, self.engines)
        self.client.keep_alive(welcome.heartbeat_s, self._beat, self._on_beat, self._on_lost)
        background = []
        try:
            if self.engines is not None:
                await self._or_stopped(self.engines.start)
                if not self._stopping.is_set():
                    self.sync = self._make_sync()
                    self.sync.announce(welcome.lineage, welcome.version, welcome.publishers, welcome.digest)
                    background += [asyncio.create_task(self.sync.run()), asyncio.create_task(self._watch_engines())]
            if welcome.hints:
                self.client.listen(welcome.hints, lambda hint: self._threadsafe(self._on_news, hint))
            await self._serve(background)
        finally:
            await self._leave(background)
        if self._failure is not None:
            raise self._failure

    def _make_sync(self) -> WeightSync:
        assert self.engines is not None
        w = self.config.weights
        credentials = self.client.credentials
        self.relay = Relay(self.client, w) if w.fanout_bind else None
        return WeightSync(
            self.engines,
            self.model_dir,
            shm=w.weights_shm,
            pull_timeout_s=w.pull_timeout_s,
            on_change=self._on_new_version,
            pair=lambda: credentials.pair if credentials else None,
            disk=self.resolved.weights_dir,
            relay=self.relay,
            spans=self.spans,
            threads=max(2, num_threads(w.weights_threads)),  # one that verifies beside one that receives
        )

    async def _or_stopped(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if self._stopping.is_set():
            return
        task = asyncio.create_task(work())
        stopped = asyncio.create_task(self._stopping.wait())
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if task.done():
            task.result()
        else:
            task.cancel()

    def stop(self) -> None:
        """Give everything back and leave."""
        self._stopping.set()
        self._slot_free.set()

    async def _drain(self) -> None:
        """Hand over what is being sampled, so that another worker continues it; whatever takes too long is given back as it was."""
        groups = list(self.draining.values())
        if self.engines is None or not groups or self._failure is not None:
            return
        try:
            async with asyncio.timeout(self.config.rollout.drain_timeout_s):
                await self.engines.leave()
                await asyncio.gather(*groups, return_exceptions=True)
        except TimeoutError:
            log.warning("%d groups were not handed over within %.1f s", len(self.draining), self.config.rollout.drain_timeout_s)
        except SlimebusError as bad:
            log.warning("groups are given back unfinished: %s", bad.text)

    async def _leave(self, background: list["asyncio.Task[None]"]) -> None:
        if not self.finished:
            await self._drain()
        for task in [*self.running.values(), *background]:
            task.cancel()
        await asyncio.gather(*self.running.values(), *background, return_exceptions=True)
        if self.engines is not None:
            await self.engines.stop()
        if self.sync is not None:
            self.sync.close()
        if self.relay is not None:
            self.relay.close()
        self.writer.close()

    # --- leasing ---

    async def _serve(self, background: list["asyncio.Task[None]"]) -> None:
        """Lease until the run ends; raises what ended leasing or anything it rests on."""
        leasing = asyncio.create_task(self._lease_forever())
        stopped = asyncio.create_task(self._stopping.wait())
        await asyncio.wait({leasing, stopped, *background}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        leasing.cancel()
        ended = [task for task in background if task.done()]
        for outcome in await asyncio.gather(leasing, *ended, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome

    async def _lease_forever(self) -> None:
        while not self.finished:
            free = self._free_groups()
            if free <= 0:
                self._slot_free.clear()
                await self._slot_free.wait()
                continue
            for leased, record, partial in await self._lease(free):
                self._begin(leased, record, partial)

    def _free_groups(self) -> int:
        """Room for so many more groups of the usual size."""
        r = self.config.rollout
        return r.max_running_groups - math.ceil(sum(self.samples_of.values()) / r.n_samples_per_prompt)

    async def _lease(self, want: int) -> list[tuple[LeasedGroup, bytes, Sequence[Any]]]:
        lineage, serving = self.sync.serving if self.sync else ("", NO_VERSION)
        request = Lease(
            want=want,
            wait_s=LEASE_WAIT_S,
            lineage=lineage,
            serving=serving,
            needs_weights=self.engines is not None,
            takes_partials=self.maker.takes_partials,
        )
        try:
            reply = await self.client.ask(request, timeout_s=LEASE_WAIT_S + 30, resend_s=LEASE_WAIT_S + 10)
        except SlimebusError as bad:
            if not bad.retryable:
                raise
            log.warning("%s", bad.text)
            return []
        answer = reply.message
        return _granted(answer, reply.bulk) if isinstance(answer, LeaseReply) else []

    def _begin(self, leased: LeasedGroup, record: bytes, partial: Sequence[Any]) -> None:
        task = asyncio.create_task(self._finish(leased, record, partial))
        if self.maker.continues(leased):
            self.draining[leased.lease] = task
        self.running[leased.lease] = task
        self.samples_of[leased.lease] = leased.num_samples
        self.busy.enter()
        task.add_done_callback(lambda done: self._ended(leased.lease, done))

    def _ended(self, lease: int, done: "asyncio.Task[None]") -> None:
        if not done.cancelled() and (fault := done.exception()) is not None:  # ours, not a plug-in's: end loudly
            self._failure = fault
            self.stop()
        self.running.pop(lease, None)
        self.samples_of.pop(lease, None)
        self.draining.pop(lease, None)
        self.busy.leave()
        self._slot_free.set()

    async def _finish(self, leased: LeasedGroup, record: bytes, partial: Sequence[Any]) -> None:
        start = time.monotonic()
        try:
            with self.spans("sample", group=leased.group, kind=leased.kind):
                samples = await asyncio.wait_for(self.maker.make(leased, record, partial), self.config.rollout.generate_timeout_s)
            headers, fields, frames = encode_group(samples)
        except partials.Unfinished as unfinished:
            await self._hand_over(leased, unfinished)
        except Dropped as why:
            self.counts.filtered += 1
            await self._give_back(leased, "drop", str(why), dropped=why)
        except TimeoutError:
            await self._give_back(leased, "fail", f"no result within generate_timeout_s = {self.config.rollout.generate_timeout_s:g} s")
        except HookError as bad:
            log.error("group %s: %s", leased.group, bad.text)
            await self._give_back(leased, "fail", bad.text)
        except SlimebusError as bad:
            log.warning("group %s: %s", leased.group, bad.text)
            await self._give_back(leased, "requeue" if bad.retryable else "fail", bad.text)
        except asyncio.CancelledError:
            await self._give_back(leased, "requeue", "worker left", timeout_s=1.0)
            raise
        else:
            lineage = self.engines.lineage if self.engines else ""
            put = Put(
                group=leased.group,
                lease=leased.lease,
                attempt=leased.attempt,
                lineage=lineage,
                samples=headers,
                fields=fields,
                seconds=time.monotonic() - start,
            )
            await self._put(put, frames)

    async def _put(self, put: Put, frames: list[bytes]) -> None:
        self.putting.add(put.lease)
        try:
            reply = (await self.client.ask(put, frames, timeout_s=PUT_TIMEOUT_S)).message
        except SlimebusError as bad:
            self.counts.discarded += 1
            log.error("group %s not put: %s", put.group, bad.text)
            return
        finally:
            self.putting.discard(put.lease)
        if isinstance(reply, PutReply) and reply.result == "discarded":
            self.counts.discarded += 1
            log.info("group %s discarded: %s", put.group, reply.reason)
        else:
            self.counts.groups += 1
            self.counts.samples += len(put.samples)
            self.counts.filtered += isinstance(reply, PutReply) and reply.reason.startswith("filtered")

    async def _hand_over(self, leased: LeasedGroup, unfinished: partials.Unfinished) -> None:
        assert self.engines is not None  # it raised this
        # What a hook does around its samples cannot be continued, nor an evaluation: that one starts again.
        kept = unfinished.responses if self.maker.continues(leased) else []
        back, frames = partials.give_back(leased, self.engines.lineage, kept)
        await self._tell(back, frames, timeout_s=self.config.rollout.drain_timeout_s)

    async def _give_back(
        self, leased: LeasedGroup, outcome: str, reason: str, *, timeout_s: float = 30.0, dropped: Dropped | None = None
    ) -> None:
        self.counts.failed += outcome == "fail"
        back = GiveBack(
            group=leased.group,
            lease=leased.lease,
            outcome=outcome,
            reason=reason[:500],
            num_tokens=dropped.num_tokens if dropped else 0,
            rewards=dropped.rewards if dropped else [],
        )
        await self._tell(back, [], timeout_s=timeout_s)

    async def _tell(self, back: GiveBack, frames: list[bytes], *, timeout_s: float) -> None:
        try:
            await self.client.ask(back, frames, timeout_s=timeout_s)
        except SlimebusError as bad:
            log.warning("group %s not given back (its lease will run out): %s", back.group, bad.text)

    async def _watch_engines(self) -> None:
        """An engine that ended is replaced, and serves nothing until it has the weights again."""
        assert self.engines is not None
        assert self.sync is not None
        while True:
            await asyncio.sleep(WATCH_S)
            if any(engine.is_dead for engine in self.engines.engines):
                self.sync.invalidate()

    # --- the bus ---

    @property
    def state(self) -> str:
        """joining, syncing, serving or draining."""
        if self._stopping.is_set() or self.finished:
            return "draining"
        if self.engines is None:
            return "serving"
        if self.sync is None:
            return "joining"
        return "serving" if self.sync.serving[1] != NO_VERSION else "syncing"

    def _on_new_version(self) -> None:
        assert self.sync is not None
        self.client.beat_now()
        self.writer.write(self.sync.serving[1], {name: round(value, 4) for name, value in self._metrics().items()})

    def _beat(self) -> Heartbeat:
        lineage, serving = self.sync.serving if self.sync else ("", NO_VERSION)
        return Heartbeat(state=self.state, lineage=lineage, serving=serving, leases=list(self.running), metrics=self._metrics())

    def _metrics(self) -> dict[str, float]:
        values = {name: float(value) for name, value in msgspec.structs.asdict(self.counts).items()}
        values |= {"running": float(len(self.running)), "busy_s": self.busy.busy_s, "serving_s": self.busy.since_s}
        values["tokens"] = float(self.engines.tokens_made if self.engines else 0)
        if self.sync is not None:
            values |= {
                "pull_failures": float(self.sync.failures),
                "sync_s": self.sync.last_sync_s,
                "pulled_bytes": float(self.sync.pulled_bytes),
                "neighbour_bytes": float(self.sync.neighbour_bytes),
                "passed_on_bytes": float(self.relay.server.sent_bytes if self.relay else 0),
            }
            values |= {f"sync_{stage}_s": seconds for stage, seconds in self.sync.stage_s.items()}
        return values

    def _threadsafe(self, function: Callable[..., None], *args: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    def _on_beat(self, reply: HeartbeatReply) -> None:
        if self.relay is not None:
            self.relay.pullers.refresh()
        self._threadsafe(self._on_news, reply)

    def _on_news(self, news: HeartbeatReply | Hint) -> None:
        if self.sync is not None:
            self.sync.announce(news.lineage, news.version, news.publishers, news.digest)
        for lease in getattr(news, "lost", []):
            task = self.running.get(lease)
            if task is not None and lease not in self.putting:  # a put crosses the heartbeat that still lists its lease
                log.warning("lease %d was lost; its group is sampled by someone else", lease)
                task.cancel()
        if news.finished and not self.finished:
            self.finished = True
            log.info("the run is finished")
            self.stop()

    def _on_lost(self, problem: SlimebusError) -> None:
        self._failure = problem
        self._threadsafe(self.stop)


def _granted(answer: LeaseReply, bulk: Sequence[Any]) -> list[tuple[LeasedGroup, bytes, Sequence[Any]]]:
    """Each group with its prompt record and the frames of the samples to continue, if there are any."""
    granted, at = [], len(answer.groups)
    for leased, record in zip(answer.groups, bulk, strict=False):
        granted.append((leased, bytes(record), bulk[at : at + leased.partial_frames]))
        at += leased.partial_frames
    if len(granted) != len(answer.groups) or at != len(bulk):
        raise ProtocolError(f"a lease of {len(answer.groups)} groups came with {len(bulk)} frames; expected {at}")
    return granted
