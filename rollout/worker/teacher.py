"""A teacher: a frozen model on an engine that gives each token of the run's samples its logprob, as a consumer. docs/consumers.md.

T tokens of one sample
"""

import asyncio
import itertools
import logging
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from msgspec.structs import replace

from rollout.engines.backends import EngineApi
from rollout.engines.pool import EnginePool
from slimebus.bus.errors import Unreachable, UsageError
from slimebus.bus.samples import Sample
from slimebus.client.connect import broker_address
from slimebus.client.consumer import ConsumedGroup, Consumer
from slimebus.config import Resolved
from slimebus.config.file_checks import TEACHER_FIELD as FIELD
from slimebus.config.file_checks import teacher_problems
from slimebus.config.load import raise_all
from slimebus.telemetry import logs
from slimebus.telemetry.metrics import usage

log = logging.getLogger("teacher")

READ_S = 1.0
"""How long a read waits for groups, and so the longest that leaving takes."""
SAMPLES_AT_ONCE = 128


def run_teacher(resolved: Resolved, broker: str | None, teacher: str, name: str | None, *, take_over: bool, debug: bool) -> None:
    """Score groups until the run is over or a signal ends it. teacher: a model folder, or the URL of an engine. Raises SlimebusError."""
    logs.set_up("teacher", debug=debug)
    raise_all(teacher_problems(resolved, teacher))
    engines, b = engines_of(resolved, teacher), resolved.config.broker
    how: Any = {"timeout_s": b.connect_timeout_s, "keys": resolved.keys_path or "", "take_over": take_over}
    name = name or "teacher"
    with Consumer(broker_address(resolved, broker), name=name, **how) as consumer:
        work = Work(consumer)
        consumer.metrics = work.metrics
        try:
            uvloop.run(_score_until_finished(work, engines, max(1, SAMPLES_AT_ONCE // resolved.config.rollout.n_samples_per_prompt)))
        except (KeyboardInterrupt, asyncio.CancelledError):
            log.info("interrupted; restart it to resume")


@dataclass
class Work:
    """What a teacher has done since its start. groups, samples, tokens: scored; unscored: samples that cannot be; busy_s: seconds."""

    consumer: Consumer
    groups: int = 0
    samples: int = 0
    tokens: int = 0
    unscored: int = 0
    busy_s: float = 0.0

    def add(self, groups: list[list[np.ndarray]], took_s: float) -> None:
        """Count groups, by the field of each sample."""
        fields = [field for group in groups for field in group]
        self.groups += len(groups)
        self.samples += len(fields)
        self.tokens += sum(map(len, fields))
        self.unscored += sum(bool(np.isnan(field).any()) for field in fields)
        self.busy_s += took_s

    def metrics(self) -> dict[str, float]:
        """What the broker gets (docs/metrics.md)."""
        own = {name: float(getattr(self, name)) for name in ("groups", "samples", "tokens", "unscored", "busy_s")}
        return own | {"position": float(self.consumer.position), "groups_skipped": float(self.consumer.num_skipped)} | usage()


def engines_of(resolved: Resolved, teacher: str) -> EnginePool:
    """One engine, not started yet. Raises ConfigError for a folder without a model."""
    is_running = "://" in teacher
    folder = resolved.model_dir if is_running else Path(teacher)
    engine = replace(resolved.config.engine, engine_url=[teacher] if is_running else [], num_engines=1, sglang_config="", use_router=False)
    return EnginePool(replace(resolved.config, engine=engine, seed=0), folder, resolved.run_dir / "logs", name="teacher")


async def _score_until_finished(work: Work, engines: EnginePool, groups_at_once: int) -> None:
    me, consumer = asyncio.current_task(), work.consumer
    assert me is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, me.cancel)
    try:
        await engines.start()
        (engine,) = engines.engines
        log.info("scores with %s", engine.url)
        while (found := await asyncio.to_thread(_read_groups, consumer, groups_at_once)) or not consumer.is_finished:
            begin = time.monotonic()
            open_ = [group for group in found if not _is_scored(group)]
            scored = await scores_of(engine.client, open_)
            await asyncio.to_thread(consumer.put_all, [(group, {FIELD: scores}) for group, scores in zip(open_, scored, strict=True)])
            work.add(scored, time.monotonic() - begin)
    finally:
        await engines.stop()


def _read_groups(consumer: Consumer, count: int) -> list[ConsumedGroup]:
    try:
        return consumer.read(count, wait_s=READ_S, extras=[FIELD])
    except Unreachable as away:
        log.debug("%s; asked again", away.text)
        return []


def _is_scored(group: ConsumedGroup) -> bool:
    return all(FIELD in sample.extras for sample in group.samples)


async def scores_of(client: EngineApi, groups: Sequence[ConsumedGroup]) -> list[list[np.ndarray]]:
    """The field of each sample of each group, f32 [T], all asked for at once.

    NaN, which the trainer refuses, where the sample cannot be scored; the log says why.
    """
    named = [(f"{group.id}-{group.lease}-{i}", sample) for group in groups for i, sample in enumerate(group.samples)]
    fields = iter(await asyncio.gather(*(_scores(client, sample, name) for name, sample in named)))
    return [list(itertools.islice(fields, len(group.samples))) for group in groups]


async def _scores(client: EngineApi, sample: Sample, name: str) -> np.ndarray:
    if not np.any(sample.loss_mask[1:]):
        return np.zeros(len(sample.tokens), np.float32)
    try:
        if sample.temperature != 1:
            raise UsageError(f"it was sampled at temperature {sample.temperature:g}, and engines score at temperature 1 only")
        return await client.score(sample.tokens.tolist(), name)
    except UsageError as bad:
        log.error("sample %s gets no %s, and so cannot be trained: %s", name, FIELD, bad.text)
        return np.full(len(sample.tokens), np.nan, np.float32)
