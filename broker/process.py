"""The process around a broker: from the run's config to rules, prompts, store and addresses; signals; the last status."""

import ctypes
import functools
import gc
import json
import logging
import signal
import threading
from pathlib import Path

from broker.filter_plugin import load_buffer_filter
from broker.shell import Broker
from broker.source import FileRows, FileSource, HookSource, NoPrompts, load_source
from broker.state.rules import EvalDataset, Rules, Sampling
from broker.state.table import PromptSource
from broker.store import open_store
from slimebus import logs
from slimebus.config import Resolved, RunConfig
from slimebus.config.check import check_evaluations
from slimebus.dynamic_filter import is_reward_spread
from slimebus.errors import ConfigError, UsageError
from slimebus.prompt_record import PromptKeys
from slimebus.security.exposure import check_bind, insecure_note
from slimebus.security.keyring import FolderKeyring
from slimebus.transport.server import Limits

log = logging.getLogger("broker")


def run_broker(resolved: Resolved, *, debug: bool) -> None:
    """Serve until the run is finished or a signal ends it. Raises SlimebusError."""
    logs.set_up("broker", debug=debug)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    broker = build(resolved)
    _settle_memory()
    log.info("broker of run %r at %s; state under %s", resolved.config.name, broker.endpoint, resolved.run_dir / "broker")
    try:
        broker.run(stop)
    finally:
        _write_status(resolved.run_dir / "status.json", broker)
    log.info("finished" if not stop.is_set() else "stopped; started again with the same run directory it goes on")


FREED_BYTES_KEPT = 64 * 1024 * 1024
LARGE_BLOCK_BYTES = 32 * 1024 * 1024
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""mallopt(3)"""


def _settle_memory() -> None:
    """Keep freed frames for the next ones, and the collector of reference cycles from walking over every group again and again.

    glibc returns a freed frame of 100 kB to the system at once and takes its pages anew for the next: half of the time it takes to receive
    it. What is read back at the start stays, and no record is part of a cycle.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not every C library has it
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, FREED_BYTES_KEPT)
        mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def _write_status(path: Path, broker: Broker) -> None:
    """The last status, for whoever looks later; a disk that takes no more must not hide how the run ended."""
    try:
        path.write_text(json.dumps(broker.last_status(), indent=1))
    except OSError as bad:
        log.error("the last status cannot be written to %s: %s", path, bad)


def build(resolved: Resolved) -> Broker:
    """The bound broker of a config. Raises DataError for prompts, UsageError for addresses or a store of another run."""
    config = resolved.config
    check_evaluations(config)
    keyring = keyring_of(resolved)
    eval_rows = {name: _rows(resolved, [dataset.path]) for name, dataset in config.eval.datasets.items()}
    source = _source(resolved)
    try:
        resolved.run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as bad:
        raise UsageError(f"cannot make the run directory {resolved.run_dir}: {bad}; give another --run-dir") from None
    store = open_store(config.broker.durability, resolved.run_dir / "broker")
    if isinstance(source, HookSource):
        source.record_of = functools.partial(store.get, "prompts")
    return Broker(
        rules_of(config, {name: len(rows) for name, rows in eval_rows.items()}),
        source,
        store,
        run=config.name,
        bind=config.broker.bind,
        hints_bind=config.broker.hints_bind or f"{config.broker.bind.rpartition(':')[0]}:0",
        eval_rows=eval_rows,
        metrics_path=resolved.run_dir / "metrics" / "broker.jsonl",
        keyring=keyring,
        max_message_bytes=config.broker.max_message_mib << 20,
        limits=limits(config),
        buffer_filter=load_buffer_filter(config.broker.buffer_filter_path, resolved.base),
    )


def limits(config: RunConfig) -> Limits:
    """The bounds of the broker's ROUTER."""
    b = config.broker
    return Limits(
        max_connections=b.max_connections,
        max_queued=b.max_queued_per_client,
        burst_bytes=b.burst_mib << 20,
        unsent_bytes=b.unsent_mib << 20,
    )


def keyring_of(resolved: Resolved) -> FolderKeyring | None:
    """The broker's keys, None without. Raises UsageError for an address beyond this machine that would be served without keys."""
    config, folder = resolved.config, resolved.keys_path
    for field in ("bind", "hints_bind"):
        address = getattr(config.broker, field)
        if address:
            check_bind(address, f"broker.{field}", has_keys=folder is not None, insecure=config.security.insecure)
    if folder is not None:
        return FolderKeyring(folder)
    if warning := insecure_note(config.broker.bind):
        log.warning("%s", warning)
    return None


def _source(resolved: Resolved) -> PromptSource:
    data = resolved.config.data
    rows = _rows(resolved, data.prompt_data) if data.prompt_data else None
    if data.source_path:
        return load_source(data.source_path, base=resolved.base, seed=resolved.config.seed, rows=rows)
    if rows is not None:
        return FileSource(rows, shuffle=data.rollout_shuffle, seed=resolved.config.seed, num_epochs=data.num_epoch or None)
    if data.wait_for_push:
        return NoPrompts()
    raise ConfigError("data.prompt_data: no file given; name at least one file of prompts, a data.source_path, or set data.wait_for_push")


def _rows(resolved: Resolved, specs: list[str]) -> FileRows:
    data = resolved.config.data
    return FileRows(
        [str(resolved.path(spec)) for spec in specs],
        keys=PromptKeys(prompt=data.input_key, label=data.label_key, metadata=data.metadata_key, tools=data.tool_key),
        skip_bad=data.skip_bad_prompts,
        spill_dir=resolved.run_dir / "broker",
    )


def rules_of(config: RunConfig, eval_sizes: dict[str, int]) -> Rules:
    """What the state machine obeys in this run. eval_sizes: prompts of each dataset."""
    r, b = config.rollout, config.broker
    return Rules(
        batch_size=r.rollout_batch_size,
        samples_per_prompt=r.n_samples_per_prompt,
        max_staleness=b.max_staleness,
        publish_interval=config.weights.update_weights_interval,
        num_steps=r.num_rollout,
        on_stale=b.on_stale,
        lease_s=b.lease_s,
        heartbeat_s=b.heartbeat_s,
        max_attempts=b.max_attempts,
        max_parked=b.max_parked,
        max_parked_per_client=b.max_parked_per_client,
        max_clients=b.max_clients,
        max_pushed=b.max_pushed,
        waits_for_push=config.data.wait_for_push,
        buffer_capacity=config.broker.buffer_capacity,
        batch_tokens=b.batch_tokens,
        over_sampling=r.over_sampling_batch_size,
        stale_wait_s=b.stale_wait_s,
        needs_spread=is_reward_spread(r.dynamic_sampling_filter_path),
        max_filtered=r.dynamic_sampling_limit,
        stall_min_s=b.stall_min_s,
        required_fields=b.required_fields,
        hedge_after=b.hedge_after,
        sampling=sampling(config),
        eval_datasets={
            name: EvalDataset(
                num_prompts=eval_sizes[name],
                num_samples=d.n_samples_per_eval_prompt,
                sampling=sampling(config)
                | {"temperature": d.temperature, "max_new_tokens": d.max_response_len or r.rollout_max_response_len},
            )
            for name, d in config.eval.datasets.items()
        },
        eval_interval=config.eval.eval_interval,
        eval_first=not config.eval.skip_eval_before_train,
    )


def sampling(config: RunConfig) -> Sampling:
    """The training sampling parameters, in SGLang's names."""
    r = config.rollout
    chosen: Sampling = {"temperature": r.rollout_temperature, "top_p": r.rollout_top_p, "max_new_tokens": r.rollout_max_response_len}
    if r.rollout_top_k > 0:
        chosen["top_k"] = r.rollout_top_k
    if r.rollout_stop:
        chosen["stop"] = list[str | int](r.rollout_stop)
    if r.rollout_stop_token_ids:
        chosen["stop_token_ids"] = list[str | int](r.rollout_stop_token_ids)
    return chosen
