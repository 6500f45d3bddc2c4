"""Records of a process: JSON lines, TensorBoard and W&B beside them; and how busy a part of the system was."""

import json
import logging
import math
import os
import resource
import socket
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from slimebus.atomic_file import make_private
from slimebus.bus.errors import UsageError

RECORDS_LOG = "slimebus.records"
log = logging.getLogger(RECORDS_LOG)

MAX_WAITING = 4096
"""Rows kept in memory while a file cannot be written; beyond that the oldest is dropped, counted and logged."""


class JsonLines:
    """Rows appended to `path`, one JSON object a line, from any thread; None writes nothing.

    While the file cannot be written (a full disk) rows wait in memory, which is logged once: a record is not worth a run.
    max_bytes: a file as large as that takes the place of its `.old.jsonl`, so that two files stay; 0: no bound.
    """

    def __init__(self, path: Path | None, *, max_bytes: int = 0) -> None:
        self.path, self.max_bytes, self.num_dropped = path, max_bytes, 0
        self._waiting: deque[bytes] = deque(maxlen=MAX_WAITING)
        self._is_failing, self._lock = False, threading.Lock()

    def add(self, row: dict[str, Any]) -> None:
        """Write a row, and those that could not be written before it."""
        if self.path is not None:
            self.add_line(json.dumps(row, separators=(",", ":")).encode())

    def add_line(self, line: bytes) -> None:
        """The same of a row that is JSON already."""
        self.write(line + b"\n")

    def write(self, record: bytes) -> None:
        """The same of the bytes of any record, which are written whole."""
        with self._lock:
            self.num_dropped += len(self._waiting) == MAX_WAITING
            self._waiting.append(record)
        self.flush()

    def flush(self) -> None:
        """Write what waits."""
        with self._lock:
            if self.path is None or not self._waiting:
                return
            try:
                self._append(self.path, b"".join(self._waiting))
            except OSError as bad:
                if not self._is_failing:
                    log.error("rows cannot be written to %s and wait in memory: %s", self.path, bad)
                self._is_failing = True
                return
            self._waiting.clear()
            if self.num_dropped:
                log.warning("%d rows were dropped while %s could not be written", self.num_dropped, self.path)
            self.num_dropped, self._is_failing = 0, False

    def _append(self, path: Path, lines: bytes) -> None:
        try:
            file = path.open("ab", buffering=0)
        except FileNotFoundError:
            make_private(path.parent)
            file = path.open("ab", buffering=0)
        with file:
            begin = file.tell()
            if file.write(lines) != len(lines):
                file.truncate(begin)  # half a line would spoil the one after it
                raise OSError("only a part was written")
        if 0 < self.max_bytes <= begin + len(lines):
            path.replace(path.with_suffix(".old.jsonl"))


OF_WEIGHTS = ("weights_", "sync_", "pull", "neighbour_", "passed_on_")
"""What the names of metrics begin with that tell how weights travel."""


def grouped(role: str, name: str) -> str:
    """A metric's name where those of all roles are together: `train/loss`, `rollout/tokens`, `weights/sync_s`, `broker/ready`."""
    if name.startswith(OF_WEIGHTS):
        return f"weights/{name.removeprefix('weights_')}"
    return f"{'train' if role in ('trainer', 'critic') else role}/{name}"


def usage() -> dict[str, float]:
    """What this process takes: its memory now (Linux; else the most so far), its CPU time so far."""
    try:
        memory = int(Path("/proc/self/statm").read_bytes().split()[1]) * resource.getpagesize()
    except OSError:
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"memory_bytes": float(memory), "cpu_s": time.process_time()}


class MetricsWriter:
    """Appends records to `directory/role.jsonl`, and scalars by their grouped names to TensorBoard and W&B when asked to.

    wandb: arguments of wandb.init. Raises UsageError when W&B is not installed or does not let us in.
    """

    def __init__(self, directory: Path, role: str, *, tensorboard: bool = False, wandb: dict[str, Any] | None = None) -> None:
        self.role, self._rows = role, JsonLines(directory / f"{role}.jsonl")
        self._events: Any = None
        self._wandb: Any = None
        if tensorboard:
            self._events = _event_writer(directory / "tensorboard" / role)
        if wandb is not None:
            self._wandb = _wandb_run(dir=str(directory), **wandb)

    def write(self, step: int, values: dict[str, Any]) -> None:
        """One record: {"time": seconds since the epoch, "step": step, ...values}, without infinities and NaN, which JSON has not."""
        values = {name: value for name, value in values.items() if not isinstance(value, float) or math.isfinite(value)}
        self._rows.add({"time": round(time.time(), 3), "step": step, **values})
        self.track(step, {grouped(self.role, name): value for name, value in values.items()})

    def track(self, step: int, values: dict[str, Any]) -> None:
        """Scalars that are on record elsewhere, by their grouped names; what is no number is left out."""
        scalars = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
        if self._events is not None:
            self._events.write(_event(time.time(), step, scalars))
        if self._wandb is not None:
            self._wandb.log({"step": step, **scalars})

    def close(self) -> None:
        """Write what waits and release the files."""
        self._rows.flush()
        if self._events is not None:
            self._events.flush()
        if self._wandb is not None:
            self._wandb.finish()


def _wandb_run(**how: Any) -> Any:
    try:
        import wandb
    except ModuleNotFoundError:
        raise UsageError("trainer.wandb needs the package wandb: pip install 'slimebus[wandb]'") from None
    try:
        run = wandb.init(project=os.environ.get("WANDB_PROJECT", "slimebus"), resume="allow", **how)
    except (wandb.errors.Error, OSError) as bad:
        raise UsageError(f"trainer.wandb: {bad}; `wandb login`, or set WANDB_MODE=offline and `wandb sync` later") from None
    run.define_metric("*", step_metric="step")
    return run


def _event_writer(folder: Path) -> Any:
    """TensorBoard's records in a file as ours: its own EventFileWriter raises what its thread could not write, on a full disk say."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}.0"
    writer = RecordWriter(JsonLines(folder / name))
    writer.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
    return writer


def _event(now: float, step: int, scalars: dict[str, float]) -> bytes:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
    return bytes(Event(wall_time=now, step=step, summary=Summary(value=values)).SerializeToString())


class BusyMeter:
    """Seconds during which at least one piece of work was under way, since the first one began."""

    def __init__(self) -> None:
        self._count, self._busy_s = 0, 0.0
        self._changed_at = self._first_at = 0.0

    def enter(self) -> None:
        """A piece of work begins."""
        self._add_elapsed()
        self._first_at = self._first_at or self._changed_at
        self._count += 1

    def leave(self) -> None:
        """A piece of work ended."""
        self._add_elapsed()
        self._count -= 1

    def _add_elapsed(self) -> float:
        now = time.monotonic()
        self._busy_s += now - self._changed_at if self._count else 0.0
        self._changed_at = now
        return now

    @property
    def busy_s(self) -> float:
        """Seconds of work so far."""
        self._add_elapsed()
        return self._busy_s

    @property
    def since_s(self) -> float:
        """Seconds since the first work began; 0 before it."""
        return time.monotonic() - self._first_at if self._first_at else 0.0
