"""Groups without a broker: one prompt, the first of a run or held-out sets through the whole path of a worker, every hook on one example.

prompt --> chat template --> session --> engine --> reward --> samples
"""

import asyncio
import contextlib
import itertools
import logging
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rollout.engines.dispatch import Dispatch
from rollout.engines.pool import EnginePool
from rollout.samples import partials
from rollout.samples.plugins import PluginError, contain_exits, hide_from_programs
from rollout.samples.response import Completion, EngineError, Response, Task
from rollout.samples.tokenizer import Tokenizer
from rollout.worker.groups import Dropped, GroupMaker
from slimebus.atomic_file import replacing
from slimebus.bus.errors import DataError, SlimebusError, UsageError
from slimebus.bus.messages import NO_VERSION, LeasedGroup
from slimebus.bus.sample_table import check_group
from slimebus.bus.samples import Sample, encode_group
from slimebus.client.exported_groups import BATCHES_FILE, write_groups
from slimebus.config import Resolved
from slimebus.config.model_folder import context_length
from slimebus.prompts.prompt_files import open_lines, parse
from slimebus.prompts.prompt_record import LineReader
from slimebus.telemetry.scores import Scores, of_attempts

log = logging.getLogger("rollout")


class LocalDispatch(Dispatch):
    """Samples from engines as they are: no trainer gives them weights. version: what their tokens say to be of.

    tokenizer: then nothing was started, and each answer is the label, cut to the most tokens asked for, with logprob -1.
    """

    def __init__(self, pool: EnginePool, version: int, tokenizer: Tokenizer | None) -> None:
        super().__init__(pool)
        self.version, self.tokenizer = version, tokenizer

    async def sample(self, tasks: list[Task], begun: list[Response] | None = None) -> list[Response]:
        """One response to each task."""
        if self.tokenizer is None:
            return await super().sample(tasks, begun)
        made = []
        for task in tasks:
            ids = self.tokenizer.encode(str(task.label) or "0")[: task.sampling.get("max_new_tokens") or None]
            completion = Completion(ids, np.full(len(ids), -1.0, np.float32), "stop", [])
            made.append(partials.continue_response(partials.empty_response(task), completion, self.version_runs(completion)))
        return made

    async def generate(
        self, prompts: list[list[int]], samplings: list[dict[str, Any]], *, group: str = "", session: str = "", model: str = ""
    ) -> list[Completion]:
        """One completion a prompt, from the least busy engine of this model."""
        engine = min(self.pool.engines_of(model), key=lambda engine: engine.running)
        rids = [f"{self.pool.name}-{next(self._ids):012d}" for _ in prompts]
        engine.running += len(prompts)
        try:
            return await engine.client.generate(prompts, samplings, rids)
        finally:
            engine.running -= len(prompts)

    def version_runs(self, completion: Completion, *, is_frozen: bool = False) -> list[tuple[int, int]]:
        """One run of `version`."""
        return [(NO_VERSION if is_frozen else self.version, len(completion.output_ids))]


@contextlib.asynccontextmanager
async def local_maker(resolved: Resolved, *, has_engine: bool = True, version: int = NO_VERSION) -> AsyncIterator[GroupMaker]:
    """A worker's GroupMaker with engines of its own, those of engine.engine_url, or none; not has_engine: the label answers."""
    contain_exits(asyncio.get_running_loop())
    hide_from_programs(resolved)
    model, data = resolved.model_dir, resolved.config.data
    tokenizer = Tokenizer(model, apply_chat_template=data.apply_chat_template, template_kwargs=data.apply_chat_template_kwargs)
    with tempfile.TemporaryDirectory() as logs:
        pool = EnginePool(resolved.config, model, Path(logs), name="local", base=resolved.base)
        starts = has_engine and resolved.config.engine.engine != "none"
        dispatch = LocalDispatch(pool, version, None if starts else tokenizer) if starts or not has_engine else None
        size, longest = pool.vocab_size, context_length(model)
        maker = GroupMaker(resolved.config, resolved.base, tokenizer, dispatch, vocab_size=size, max_context_len=longest)
        try:
            if starts:
                await pool.start()
            await maker.setup()
            yield maker
        finally:
            await maker.teardown()
            await pool.stop()


def make_lease(name: str, number: int, num_samples: int, sampling: dict[str, Any], kind: str = "eval") -> LeasedGroup:
    """A group as a broker would lease it."""
    dataset = name if kind == "eval" else ""
    return LeasedGroup(
        group=f"{name}/{number}", lease=number + 1, num_samples=num_samples, deadline_s=1e9, kind=kind, dataset=dataset, sampling=sampling
    )


def read_prompts(resolved: Resolved, entry: str) -> Iterator[bytes]:
    """The prompts of a file, or of a slice of it. Raises DataError with file, line and reason."""
    spec, reader = parse(str(resolved.path(entry))), LineReader(resolved.prompt_keys)
    with open_lines(spec.path, reader.keys) as file:
        file.seek(0)
        lines = [(number, line) for number, line in enumerate(file, 1) if not line.isspace()]
    for i in spec.rows_of(len(lines)):
        try:
            yield reader.record(lines[i][1])
        except DataError as bad:
            raise DataError(f"{spec.path}:{lines[i][0]}: {bad.text}") from None


# --- slimebus eval --model ---


def evaluate(resolved: Resolved, names: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each held-out set, as `evaluate_reply` has them (docs/protocol.md). Raises SlimebusError."""
    return asyncio.run(_evaluate(resolved, names))


async def _evaluate(resolved: Resolved, names: Sequence[str]) -> list[dict[str, Any]]:
    rows, room = [], asyncio.Semaphore(resolved.config.rollout.max_running_groups)
    prompts = {name: list(read_prompts(resolved, resolved.config.eval.datasets[name].path)) for name in names}
    async with local_maker(resolved) as maker:

        async def score(lease: LeasedGroup, record: bytes, scores: Scores) -> None:
            async with room:
                try:
                    samples = await maker.make_group(lease, record)
                except (PluginError, EngineError) as bad:
                    log.warning("group %s: %s", lease.group, bad)
                    return scores.add([], lease.num_samples)
                attempts = (i if sample.trajectory is None else sample.trajectory for i, sample in enumerate(samples))
                scores.add(*of_attempts(attempts, (sample.reward for sample in samples)))

        for name in names:
            dataset, scores = resolved.config.eval.datasets[name], Scores()
            number, sampling = dataset.n_samples_per_eval_prompt, resolved.config.rollout.sampling | dataset.own_sampling
            await asyncio.gather(
                *(score(make_lease(name, row, number, sampling), record, scores) for row, record in enumerate(prompts[name]))
            )
            rows.append({"dataset": name, "model": str(resolved.model_dir), **scores.row()})
    return rows


# --- slimebus try ---


def sample_prompt(resolved: Resolved, record: dict[str, Any], num_samples: int) -> tuple[list[Sample], list[list[str]]]:
    """The samples of one prompt, and each one's tokens as text. Raises SlimebusError, PluginError for what a hook or reward did."""

    async def work() -> tuple[list[Sample], list[list[str]]]:
        async with local_maker(resolved) as maker:
            lease = make_lease("try", 0, num_samples, resolved.config.rollout.sampling)
            samples = await maker.make_group(lease, msgspec.msgpack.encode(record))
            return samples, [[maker.tokenizer.decode(np.array([i]), skip_special_tokens=False) for i in s.tokens] for s in samples]

    return asyncio.run(work())


# --- slimebus sample ---


class Sampled(msgspec.Struct):
    """What `sample_prompts` made. left_out: why, of each group that is not written; num_prompts: that there were, of those asked for."""

    groups: dict[str, list[Sample]] = {}
    left_out: dict[str, str] = {}
    num_prompts: int = 0
    is_interrupted: bool = False


def sample_prompts(resolved: Resolved, count: int, out: Path) -> Sampled:
    """Write the groups of the first `count` prompts into the folder `out`, as `buffer export` does, their tokens of version 0; where
    Ctrl-C or SIGTERM ends it those that are done.

    Raises UsageError for a folder that is not empty or cannot be written, SlimebusError as a worker does.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        is_taken = any(out.iterdir())
    except OSError as bad:
        raise UsageError(f"cannot make {out}: {bad.strerror}; name a folder that does not exist yet") from None
    if is_taken:
        raise UsageError(f"{out} is not empty; name a folder that does not exist yet")
    try:
        made = asyncio.run(_sample_prompts(resolved, count))
        if made.groups:
            _write_groups(made.groups, out, resolved.config.rollout.rollout_batch_size)
        return made
    finally:
        if not (out / BATCHES_FILE).exists():
            shutil.rmtree(out, ignore_errors=True)


def _write_groups(groups: dict[str, list[Sample]], out: Path, batch_size: int) -> None:
    names = list(groups)
    steps = enumerate(names[i : i + batch_size] for i in range(0, len(names), batch_size))
    rows = [{"step": i, "version": 0, "groups": of_step} for i, of_step in steps]
    try:
        write_groups(out, groups.items())
        with replacing(out / BATCHES_FILE) as file:
            file.write(msgspec.json.Encoder().encode_lines(rows))
    except OSError as bad:
        raise UsageError(f"cannot write {out}: {bad}; name a folder on a disk with room") from None


async def _sample_prompts(resolved: Resolved, count: int) -> Sampled:
    room, config = asyncio.Semaphore(resolved.config.rollout.max_running_groups), resolved.config
    prompts = list(
        itertools.islice(itertools.chain.from_iterable(read_prompts(resolved, entry) for entry in config.data.prompt_data), count)
    )
    made, task = Sampled(num_prompts=len(prompts)), asyncio.current_task()
    assert task is not None
    async with local_maker(resolved, version=0) as maker:

        async def sample(number: int, record: bytes) -> None:
            lease = make_lease("sample", number, config.rollout.n_samples_per_prompt, config.rollout.sampling, "train")
            async with room:
                try:
                    samples = await maker.make_group(lease, record)
                    check_group(encode_group(samples), num_samples=lease.num_samples)
                    made.groups[lease.group] = samples
                except (SlimebusError, Dropped, partials.Unfinished) as bad:
                    made.left_out[lease.group] = str(bad)

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        try:
            await asyncio.gather(*(sample(i, record) for i, record in enumerate(prompts)))
        except asyncio.CancelledError:
            made.is_interrupted = True
    made.groups = dict(sorted(made.groups.items(), key=lambda item: int(item[0].rpartition("/")[2])))
    return made


# --- slimebus check-hooks ---


def check_hooks(resolved: Resolved) -> list[tuple[str, str, str]]:
    """(what, what it gave, what is wrong with it) for the hooks of training and of each evaluation, on the first prompt of its file.

    The samples are made by the generate hook, else they are the label; nothing is started.
    """
    return asyncio.run(_check_hooks(resolved))


async def _check_hooks(resolved: Resolved) -> list[tuple[str, str, str]]:
    config, found = resolved.config, []
    sampling, r = config.rollout.sampling, config.rollout
    first, size = config.data.prompt_data[:1], min(4, r.n_samples_per_prompt)
    wanted = [("rollout", entry, make_lease("check", 0, size, sampling, "train")) for entry in first]
    wanted += [
        (f"eval.datasets.{name}", d.path, make_lease(name, 0, 1, sampling | d.own_sampling)) for name, d in config.eval.datasets.items()
    ]
    async with local_maker(resolved, has_engine=False) as maker:
        maker.is_strict = True
        for what, entry, lease in wanted:
            begun, wrong, gave = time.perf_counter(), "", ""
            try:
                samples = await maker.make_group(lease, next(read_prompts(resolved, entry)))
                gave = f"rewards {', '.join(str(s.reward) for s in samples)}"
            except Dropped as dropped:
                gave = f"rewards {', '.join(map(str, dropped.rewards))}; the dynamic filter drops the group"
            except SlimebusError as bad:
                wrong = bad.text
            found.append((what, f"{gave} in {time.perf_counter() - begun:.2f} s", wrong))
    return found
