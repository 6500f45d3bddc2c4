"""A rollout worker: lease groups, sample and reward them, put them; follow the weights; leave without losing anything.

STARTING -> SYNCING -> SERVING -> DRAINING
              ^----------'  (an engine ended, or the lineage changed)
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec
import uvloop

from rollout.engines.dispatch import Dispatch
from rollout.engines.pool import EnginePool
from rollout.samples.plugins import called_in, contain_exits, hide_from_programs
from rollout.samples.tokenizer import Tokenizer
from rollout.weights.sync import WeightRelay, WeightSync
from rollout.worker.attempts import Attempts, without_samples
from rollout.worker.groups import GroupMaker
from slimebus.bus.errors import ProtocolError, SlimebusError, UsageError
from slimebus.bus.messages import (
    LEASE_SUM_MODULUS,
    NO_VERSION,
    Command,
    CommandReply,
    Heartbeat,
    HeartbeatReply,
    Hint,
    Lease,
    LeasedGroup,
    LeaseReply,
    Welcome,
)
from slimebus.bus.transport.client import Client
from slimebus.client import connect
from slimebus.config import Resolved
from slimebus.config.file_checks import worker_problems
from slimebus.config.load import raise_all
from slimebus.config.model_folder import context_length
from slimebus.hooks.hooks import text_of
from slimebus.process.launch import interrupt_on_sigterm
from slimebus.process.loop_watch import LoopWatch, progress_of
from slimebus.security.exposure import check_bind
from slimebus.telemetry import logs
from slimebus.telemetry.metrics import MetricsWriter, usage
from slimebus.telemetry.spans import Spans
from slimebus.weights.threads import num_threads

log = logging.getLogger("rollout")

LEASE_WAIT_S = 10.0
MAX_KEPT = 64
"""Outcomes of commands."""
PULL_TIMEOUT_S = 120.0
"""Of one pull, after which the worker says why and tries again."""
LEAST_LIMIT_S = 10.0
"""A worker ends when its loop is blocked for `broker.lease_s`, or for this if that is less."""
LEAVE_S = 30.0
"""What leaving takes at most, beside handing over: engines and hooks have 10 s each to end."""
GOODBYE_S = 1.0
REMEDY = "a coroutine function must await what takes long, a plain one runs in a thread of its own"


class Commands:
    """Does commands in the background. outcomes: of those done, by key. pool: None for a worker without engines."""

    def __init__(self, pool: EnginePool | None, *, drain: Callable[[], None], on_outcome: Callable[[], None]) -> None:
        self.pool, self.drain, self.on_outcome = pool, drain, on_outcome
        self.outcomes: dict[str, CommandReply] = {}
        self._running: dict[str, asyncio.Task[None]] = {}

    def start_commands(self, commands: Sequence[Command]) -> None:
        """Begin those that are new."""
        for command in commands:
            if command.key not in self._running and command.key not in self.outcomes:
                self._running[command.key] = asyncio.create_task(self._run_command(command))

    async def _run_command(self, command: Command) -> None:
        try:
            outcome = CommandReply(done=True, text=await self._result_of(command))
        except SlimebusError as bad:
            outcome = CommandReply(done=True, failed=True, text=bad.text)
        except Exception as bad:  # noqa: BLE001  the command is answered, for any error of an engine
            outcome = CommandReply(done=True, failed=True, text=text_of(bad))
        finally:
            del self._running[command.key]
        log.log(logging.WARNING if outcome.failed else logging.INFO, "%s: %s", command.action, outcome.text)
        self.outcomes = dict(list({**self.outcomes, command.key: outcome}.items())[-MAX_KEPT:])
        self.on_outcome()

    async def _result_of(self, command: Command) -> str:
        if command.action == "drain":
            self.drain()
            return "it leaves"
        if self.pool is None:
            raise UsageError("this worker has no engines (engine.engine: none)")
        return await (self.pool.attach if command.action == "attach" else self.pool.detach)(command.url)

    def cancel(self) -> None:
        """Leave what is being done."""
        for task in self._running.values():
            task.cancel()


class Worker:
    """One worker process. `run` returns when the run is finished or `stop` was called."""

    def __init__(self, resolved: Resolved, client: Client, *, name: str) -> None:
        self.resolved, self.config, self.client = resolved, resolved.config, client
        c = resolved.config
        self.has_engines = c.engine.engine != "none"
        self.pool = EnginePool(c, resolved.model_dir, resolved.run_dir / "logs", name=name, base=resolved.base)
        self.engines = Dispatch(self.pool)
        self.commands = Commands(self.pool if self.has_engines else None, drain=self.stop, on_outcome=lambda: client.beat_now())
        self.sync: WeightSync | None = None
        self.relay: WeightRelay | None = None
        self.writer = MetricsWriter(resolved.run_dir / "metrics", f"rollout-{name}")
        self.spans = Spans(resolved.run_dir / "metrics", name, run=c.name)
        client.on_clock = self.spans.compare_clock
        self.finished = False
        self._lists_leases = False
        self._recalls = 0
        self._failure: BaseException | None = None
        self._stopping = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.watch = LoopWatch(
            "the event loop",
            progress_of(self._loop),
            on_signal=lambda: self._threadsafe(self.stop),
            on_end=self._end_at_once,
            who=lambda: called_in(self._loop)[0],
            grace_s=c.rollout.drain_timeout_s + LEAVE_S,
        )

    # --- life ---

    async def run(self, welcome: Welcome, tokenizer: Tokenizer) -> None:
        """Serve until the broker says the run is finished, or stop() is called. Raises what made it fail."""
        contain_exits(self._loop)
        hide_from_programs(self.resolved)
        offered, longest = self.engines if self.has_engines else None, context_length(self.resolved.model_dir)
        size = self.engines.vocab_size
        maker = GroupMaker(self.config, self.resolved.base, tokenizer, offered, vocab_size=size, max_context_len=longest)
        about: dict[str, Any] = {"max_group_bytes": welcome.max_message_bytes, "spans": self.spans, "give_up": self._give_up}
        self.attempts = Attempts(self.config.rollout, self.client, maker, self.engines, **about)
        self.client.keep_alive(welcome.heartbeat_s, self._beat, self._on_beat, lambda problem: self._threadsafe(self._give_up, problem))
        background = []
        try:
            if self.has_engines:
                await self._until_stopped(self.pool.start, [])
            if self.has_engines and not self._stopping.is_set():
                self.sync = self._make_sync()
                self.sync.announce(welcome.lineage, welcome.version, welcome.publishers, welcome.digest)
                background.append(asyncio.create_task(self.sync.run()))
            if welcome.hints:
                self.client.listen(welcome.hints, lambda hint: self._threadsafe(self._on_news, hint))
            await self._until_stopped(maker.setup, background)
            self.watch.limit_s = max(LEAST_LIMIT_S, self.config.broker.lease_s)  # until here hooks may load models, and nothing is leased
            await self._until_stopped(self._lease_forever, background)
        finally:
            await self._leave(background)
            await maker.teardown()
        if self._failure is not None:
            raise self._failure

    def _make_sync(self) -> WeightSync:
        w = self.config.weights
        credentials = self.client.credentials
        self.relay = WeightRelay(self.client, self.config) if w.fanout_bind else None
        return WeightSync(
            self.pool,
            self.resolved.model_dir,
            shm=w.weights_shm,
            pull_timeout_s=PULL_TIMEOUT_S,
            on_change=self._on_new_version,
            pair=lambda: credentials.pair if credentials else None,
            disk=self.resolved.weights_dir,
            relay=self.relay,
            spans=self.spans,
            threads=max(2, num_threads()),  # one that verifies beside one that receives
        )

    async def _until_stopped(self, work: Callable[[], Coroutine[Any, Any, None]], background: list["asyncio.Task[None]"]) -> None:
        """Do this until it is done, stop is called, or what it rests on ends. Raises what ended any of them."""
        if self._stopping.is_set():
            return
        task, stopped = asyncio.create_task(work()), asyncio.create_task(self._stopping.wait())
        await asyncio.wait({task, stopped, *background}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        task.cancel()
        ended = [one for one in background if one.done()]
        for outcome in await asyncio.gather(task, *ended, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome

    def stop(self) -> None:
        """Give everything back and leave."""
        self.watch.leave()
        self._stopping.set()

    def _give_up(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self.stop()

    async def _leave(self, background: list["asyncio.Task[None]"]) -> None:
        self.commands.cancel()
        await self.pool.finish_loads()
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await self.pool.leave()
        if self.has_engines and self._failure is None and not self.finished:
            await self.attempts.hand_over()
        await self.attempts.cancel()
        await self.pool.stop()
        if self.has_engines and self.attempts.maker.hooks is not None:  # what they counted since
            self._on_new_version()
        for part in (self.sync, self.relay, self.writer):
            if part is not None:
                part.close()

    def _end_at_once(self, why: str, is_blocked: bool) -> None:
        """From the watch's thread, before it ends the process: the group that blocks the loop failed, others may have the rest now.

        Where that group is not known all of them count as lost with their worker, or it would block one worker after the other.
        """
        _, leased = called_in(self._loop) if is_blocked else ("", None)
        if is_blocked:
            why = f"{why}; {REMEDY}"
            log.error("%s", why)
        with contextlib.suppress(SlimebusError):
            if leased is not None:
                self.client.call(without_samples(leased, "fail", why), timeout_s=GOODBYE_S)
        self.client.close(goodbye=leased is not None or self.watch.is_leaving)

    # --- leasing ---

    async def _lease_forever(self) -> None:
        r = self.config.rollout
        while not self.finished:
            # Room for so many more groups of the usual size.
            free = r.max_running_groups - math.ceil(self.attempts.num_samples / r.n_samples_per_prompt)
            if free <= 0:
                self.attempts.ended.clear()
                await self.attempts.ended.wait()
                continue
            for leased, record, partial in await self._lease(free):
                self.attempts.begin_attempt(leased, record, partial)

    async def _lease(self, want: int) -> list[tuple[LeasedGroup, bytes, Sequence[Any]]]:
        (lineage, serving), partials = self._serving, self.attempts.maker.takes_partials
        needs = {"needs_weights": self.has_engines, "takes_partials": partials}
        request = Lease(want=want, wait_s=LEASE_WAIT_S, lineage=lineage, serving=serving, **needs)
        try:
            reply = await self.client.ask(request, timeout_s=LEASE_WAIT_S + 30, resend_s=LEASE_WAIT_S + 10)
        except SlimebusError as bad:
            if not bad.retryable:
                raise
            log.warning("%s", bad.text)
            return []
        answer = reply.expect(LeaseReply)
        if answer.finished:
            self._finish_run()
        return _granted(answer, reply.bulk)

    # --- the bus ---

    @property
    def _serving(self) -> tuple[str, int]:
        return self.sync.serving if self.sync else ("", NO_VERSION)

    @property
    def state(self) -> str:
        """starting: ..., syncing, serving or draining."""
        if self._stopping.is_set() or self.finished:
            return "draining"
        if self.has_engines and self.sync is None:
            return "starting: waits for its engine"
        return "syncing" if self.has_engines and self._serving[1] == NO_VERSION else "serving"

    def _on_new_version(self) -> None:
        self.client.beat_now()
        self.writer.write(self._serving[1], {name: round(value, 4) for name, value in self._metrics().items()})

    def _beat(self) -> Heartbeat:
        lineage, serving = self._serving
        leases = list(self.attempts.running)
        listed, self._lists_leases = leases if self._lists_leases else None, False
        return Heartbeat(
            state=self.state,
            lineage=lineage,
            serving=serving,
            num_leases=len(leases),
            lease_sum=sum(leases) % LEASE_SUM_MODULUS,
            leases=listed,
            metrics=self._metrics(),
            engines=[engine.report() for engine in self.pool.engines],
            outcomes=self.commands.outcomes,
            blocked_s=round(self.watch.blocked_s, 1),
            blocked_at=self.watch.blocked_at,
        )

    def _metrics(self) -> dict[str, float]:
        attempts = self.attempts
        values: dict[str, float] = msgspec.structs.asdict(attempts.counts)
        values |= {"running": len(attempts.running), "busy_s": attempts.busy.busy_s, "serving_s": attempts.busy.since_s}
        values["tokens"] = self.engines.tokens_made
        if self.sync is not None:
            values |= {
                "pull_failures": self.sync.failures,
                "sync_s": self.sync.last_sync_s,
                "pulled_bytes": self.sync.pulled_bytes,
                "neighbour_bytes": self.sync.neighbour_bytes,
                "passed_on_bytes": self.relay.server.sent_bytes if self.relay else 0,
            }
            values |= {f"sync_{stage}_s": seconds for stage, seconds in self.sync.stage_s.items()}
        numbers = attempts.maker.hooks.numbers if attempts.maker.hooks is not None else {}
        values |= usage()
        return {name: float(value) for name, value in (values | numbers | values).items()}  # its own first: the broker keeps so many

    def _threadsafe(self, function: Callable[..., None], *args: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    def _on_beat(self, reply: HeartbeatReply) -> None:
        if reply.list_leases:
            self._lists_leases = True
            self.client.beat_now()
        self._threadsafe(self._on_news, reply)

    def _on_news(self, news: HeartbeatReply | Hint) -> None:
        if self.sync is not None:
            self.sync.announce(news.lineage, news.version, news.publishers, news.digest)
        if isinstance(news, HeartbeatReply):
            self.commands.start_commands(news.commands)
            for lease in news.lost:
                self.attempts.abort(lease, logging.WARNING, "was lost; its group is sampled by someone else")
            for lease in news.recalled:
                self.attempts.recall(lease)
            for lease in news.surplus:
                self.attempts.abort(lease, logging.INFO, "is surplus; its group can be in no step any more")
        elif news.recalls != self._recalls:
            self._recalls = news.recalls
            self.client.beat_now()
        if news.finished:
            self._finish_run()

    def _finish_run(self) -> None:
        if not self.finished:
            self.finished = True
            log.info("the run is finished")
            self.stop()


def _granted(answer: LeaseReply, bulk: Sequence[Any]) -> list[tuple[LeasedGroup, bytes, Sequence[Any]]]:
    """Each group with its prompt record and the frames of the samples to continue, if there are any."""
    granted, at = [], len(answer.groups)
    for leased, record in zip(answer.groups, bulk, strict=False):
        granted.append((leased, bytes(record), bulk[at : at + leased.partial_frames]))
        at += leased.partial_frames
    if len(granted) != len(answer.groups) or at != len(bulk):
        raise ProtocolError(f"a lease of {len(answer.groups)} groups came with {len(bulk)} frames; expected {at}")
    return granted


# --- its process ---


def run_worker(resolved: Resolved, broker: str | None, name: str | None, *, take_over: bool, debug: bool) -> None:
    """Run one worker until the run is finished or a signal ends it. Raises SlimebusError."""
    logs.set_up("rollout", debug=debug, run_dir=resolved.run_dir)
    interrupt_on_sigterm()
    raise_all(worker_problems(resolved))
    if bind := resolved.config.weights.fanout_bind:
        check_bind(bind, "weights.fanout_bind", has_keys=resolved.keys_path is not None, insecure=resolved.config.security.insecure)
    client = connect.make_client(resolved, broker, role="rollout", name=name or connect.process_name("worker"))
    client.rejoins = True
    try:
        # Both may take long and are done before there is a loop: here a signal ends them at once, and there is nothing to give back.
        welcome = connect.join(client, "rollout", resolved.config.broker.connect_timeout_s, take_over=take_over)
        connect.report_starting(client, welcome, "loads its tokenizer")
        data = resolved.config.data
        kwargs = data.apply_chat_template_kwargs
        tokenizer = Tokenizer(resolved.model_dir, apply_chat_template=data.apply_chat_template, template_kwargs=kwargs)
        uvloop.run(_run(resolved, client, welcome, tokenizer))
    except KeyboardInterrupt:
        log.info("interrupted")
    finally:
        client.close()


async def _run(resolved: Resolved, client: Client, welcome: Welcome, tokenizer: Tokenizer) -> None:
    worker = Worker(resolved, client, name=client.name)
    worker.watch.start()
    await worker.run(welcome, tokenizer)
    worker.watch.exit_code = 0  # all that is left to do is to end
