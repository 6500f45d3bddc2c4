"""The broker process from start to end: reads the config, opens store, prompts and addresses, handles signals, writes the last status."""

import contextlib
import ctypes
import faulthandler
import functools
import gc
import json
import logging
import operator
import os
import signal
import threading
from pathlib import Path

from broker.buffer_filter import buffer_filter, load_plugin
from broker.page.history import History
from broker.page.process import PageProcess
from broker.request_loop import Broker
from broker.source import FileRows, FileSource, HookSource, load_source
from broker.state import settings
from broker.state.prompt_source import PromptSource
from broker.state.rules import HeldOutSet, Rules
from broker.store import open_store
from slimebus.atomic_file import make_private, replacing
from slimebus.bus.errors import ConfigError, UsageError
from slimebus.bus.transport.server import Limits, connections_of
from slimebus.config import Resolved, RunConfig
from slimebus.config.agreement import settings_of
from slimebus.config.field_rules import evaluation_problems
from slimebus.config.file_checks import label_problems
from slimebus.config.load import raise_all
from slimebus.config.saved import note_changes, save_config
from slimebus.config.schema import is_reward_spread
from slimebus.process.loop_watch import LoopWatch
from slimebus.security.exposure import check_bind, insecure_note
from slimebus.security.keyring import FolderKeyring
from slimebus.telemetry import logs

log = logging.getLogger("broker")

UNSENT_BYTES = 1 << 30
"""Most samples on their way to processes that are slow to take them; one more fetch is answered `busy`."""
LEAVE_BLOCKED_S = 10.0
"""After a signal to stop: the disk may be slow. What is acknowledged is on disk as far as `broker.durability` says."""
VALIDATE = "SLIMEBUS_VALIDATE"
"""Environment variable of tests: the tables of the state are compared after each burst."""
CLIENT_TIMEOUT_S = 30.0
"""Silence after which a client counts as gone."""
MAX_PUSHED = 1_000_000
"""Most pushed prompts that wait to be sampled; a client that pushes more has to wait."""


def run_broker(resolved: Resolved, *, debug: bool, accepts_changes: bool) -> None:
    """Serve until the run is finished or a signal ends it. Raises SlimebusError."""
    logs.set_up("broker", debug=debug, run_dir=resolved.run_dir)
    faulthandler.enable()  # a store file that is cut short meanwhile ends the process where LMDB reads it: the log has to say so
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    note_changes(resolved, is_confirmed=accepts_changes)
    broker = build_broker(resolved)
    with contextlib.ExitStack() as stack:
        page = _start_page(resolved, broker.endpoint)
        if page is not None:
            stack.callback(page.stop)
        stack.callback(lambda: _write_status(resolved.run_dir / "status.json", broker))
        _tune_memory()
        log.info("broker of run %r at %s; state under %s", resolved.config.name, broker.endpoint, resolved.run_dir / "broker")
        turns = LoopWatch("the broker's loop", lambda: broker.num_turns, on_signal=stop.set, leave_blocked_s=LEAVE_BLOCKED_S)
        turns.start()
        broker.run(stop)
    log.info("finished" if not stop.is_set() else "stopped; restart it with the same run directory to resume the run")


FREED_BYTES_KEPT = 64 * 1024 * 1024
LARGE_BLOCK_BYTES = 32 * 1024 * 1024
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""mallopt(3)"""


def _tune_memory() -> None:
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


def _start_page(resolved: Resolved, endpoint: str) -> PageProcess | None:
    """The page, where one is wanted. Raises UsageError for an address that cannot be bound."""
    try:
        save_config(resolved)
        if not resolved.config.broker.http:
            return None
        page = PageProcess(resolved, endpoint)
    except OSError as bad:
        log.error("no page is served: %s", bad)
        return None
    log.info("page: %s", page.url)
    return page


def _write_status(path: Path, broker: Broker) -> None:
    """The last status, and of a finished run advice, for later; a disk that takes no more must not hide how the run ended."""
    status = broker.last_status()
    if status["state"] == "finished":
        history = History(path.parent)
        while history.read():
            continue
        status["advice"] = history.advice(status)
        for sentence in status["advice"]:
            log.info("%s", sentence)
    try:
        with replacing(path) as file:
            file.write(json.dumps(status, indent=1).encode())
    except OSError as bad:
        log.error("the last status cannot be written to %s: %s", path, bad)


def build_broker(resolved: Resolved) -> Broker:
    """The bound broker of a config. Raises DataError for prompts, UsageError for addresses or a store of another run."""
    config = resolved.config
    raise_all([*evaluation_problems(config), *label_problems(resolved)])
    keyring = keyring_of(resolved)
    eval_rows = {name: _open_rows(resolved, [dataset.path]) for name, dataset in config.eval.datasets.items()}
    source = _open_source(resolved)
    try:
        make_private(resolved.run_dir)
    except OSError as bad:
        raise UsageError(f"cannot make the run directory {resolved.run_dir}: {bad}; give another --run-dir") from None
    store = open_store(config.broker.durability, resolved.run_dir / "broker")
    if isinstance(source, HookSource):
        source.record_of = functools.partial(store.get, "prompts")
    filter_path = config.broker.buffer_filter_path
    return Broker(
        rules_of(config, {name: len(rows) for name, rows in eval_rows.items()}, settings_of(resolved, "broker")),
        source,
        store,
        run=config.name,
        bind=config.broker.bind,
        hints_bind=config.broker.hints_bind or f"{config.broker.bind.rpartition(':')[0]}:0",
        eval_rows=eval_rows,
        metrics_path=resolved.run_dir / "metrics" / "broker.jsonl",
        keyring=keyring,
        max_message_bytes=config.broker.max_message_mib << 20,
        limits=Limits(max_connections=connections_of(config.broker.max_clients), unsent_bytes=UNSENT_BYTES),
        buffer_filter=buffer_filter(load_plugin(filter_path, resolved.base), filter_path) if filter_path else None,
        validates=bool(os.environ.get(VALIDATE)),
    )


def keyring_of(resolved: Resolved) -> FolderKeyring | None:
    """The broker's keys, None without. Raises UsageError for an address beyond this machine that would be served without keys."""
    config, folder = resolved.config, resolved.keys_path
    for field in ("bind", "hints_bind", "http"):
        address = getattr(config.broker, field)
        address = f"tcp://{address}" if address and field == "http" else address
        if address:
            check_bind(address, f"broker.{field}", has_keys=folder is not None, insecure=config.security.insecure)
    if folder is not None:
        return FolderKeyring(folder)
    if warning := insecure_note(config.broker.bind):
        log.warning("%s", warning)
    return None


def _open_source(resolved: Resolved) -> PromptSource:
    data = resolved.config.data
    rows = _open_rows(resolved, data.prompt_data) if data.prompt_data else None
    if data.source_path:
        return load_source(data.source_path, base=resolved.base, seed=resolved.config.seed, rows=rows)
    if rows is not None:
        return FileSource(rows, shuffle=data.rollout_shuffle, seed=resolved.config.seed, num_epochs=data.num_epoch or None)
    if data.wait_for_push:
        return PromptSource()
    raise ConfigError("data.prompt_data: no file given; name at least one file of prompts, a data.source_path, or set data.wait_for_push")


def _open_rows(resolved: Resolved, specs: list[str]) -> FileRows:
    paths, skip_bad = [str(resolved.path(spec)) for spec in specs], resolved.config.data.skip_bad_prompts
    return FileRows(paths, keys=resolved.prompt_keys, skip_bad=skip_bad, spill_dir=resolved.run_dir / "broker")


def rules_of(config: RunConfig, eval_sizes: dict[str, int], agreed: dict[str, str] | None = None) -> Rules:
    """What the state machine obeys in this run. eval_sizes: prompts of each dataset; agreed: settings that all must have."""
    r, b = config.rollout, config.broker
    said = {rule: operator.attrgetter(name)(config) for name, rule in settings.RULES.items()}
    held_out = {}
    for name, d in config.eval.datasets.items():
        num_samples, sampling = d.n_samples_per_eval_prompt, r.sampling | d.own_sampling
        held_out[name] = HeldOutSet(num_prompts=eval_sizes[name], num_samples=num_samples, sampling=sampling)
    return Rules(
        **said | ({"max_staleness": b.staleness_floor, "target_ess": b.target_ess} if b.max_staleness == "auto" else {}),
        staleness_range=(b.staleness_floor, b.staleness_ceiling),
        **{name: getattr(config.broker, name) for name in ("heartbeat_s", "max_clients", "stall_min_s", "required_fields", "fill_first")},
        num_steps=r.num_rollout,
        client_timeout_s=CLIENT_TIMEOUT_S,
        max_parked=max(4096, config.broker.max_clients),
        max_pushed=MAX_PUSHED,
        waits_for_push=config.data.wait_for_push,
        masks_offpolicy=r.mask_offpolicy_in_partial_rollout,
        needs_spread=is_reward_spread(r.dynamic_sampling_filter_path),
        sampling=r.sampling,
        agreed=agreed or {},
        eval_datasets=held_out,
        eval_first=not config.eval.skip_eval_before_train,
    )
