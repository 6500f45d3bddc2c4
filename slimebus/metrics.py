"""Metrics: one JSON line a record, and TensorBoard beside it; and how busy a part of the system was."""

import json
import time
from pathlib import Path
from typing import IO, Any


class MetricsWriter:
    """Appends records to `directory/role.jsonl`, and scalars to TensorBoard event files when asked to."""

    def __init__(self, directory: Path, role: str, *, tensorboard: bool = False) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = (directory / f"{role}.jsonl").open("a", buffering=1)
        self._events: Any = _event_writer(directory / "tensorboard" / role) if tensorboard else None

    def write(self, step: int, values: dict[str, Any]) -> None:
        """One record: {"time": seconds since the epoch, "step": step, ...values}."""
        now = time.time()
        self._file.write(json.dumps({"time": round(now, 3), "step": step, **values}) + "\n")
        if self._events is not None:
            self._events.add_event(_event(now, step, values))
            self._events.flush()

    def close(self) -> None:
        """Flush and release the files."""
        self._file.close()
        if self._events is not None:
            self._events.close()


def _event_writer(directory: Path) -> Any:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    return EventFileWriter(str(directory))


def _event(now: float, step: int, values: dict[str, Any]) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    scalars = [Summary.Value(tag=name, simple_value=float(v)) for name, v in values.items() if isinstance(v, int | float)]
    return Event(wall_time=now, step=step, summary=Summary(value=scalars))


class BusyMeter:
    """Seconds during which at least one piece of work was under way, since the first one began."""

    def __init__(self) -> None:
        self._count, self._busy_s = 0, 0.0
        self._began_at = self._since = 0.0

    def enter(self) -> None:
        """A piece of work begins."""
        now = time.monotonic()
        self._since = self._since or now
        if self._count == 0:
            self._began_at = now
        self._count += 1

    def leave(self) -> None:
        """A piece of work ended."""
        self._count -= 1
        if self._count == 0:
            self._busy_s += time.monotonic() - self._began_at

    @property
    def busy_s(self) -> float:
        """Seconds of work so far."""
        return self._busy_s + (time.monotonic() - self._began_at if self._count else 0.0)

    @property
    def since_s(self) -> float:
        """Seconds since the first work began; 0 before it."""
        return time.monotonic() - self._since if self._since else 0.0
