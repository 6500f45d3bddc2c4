"""What a process was doing when: one JSON line for each piece of work, from which `slimebus trace` makes a timeline."""

import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

log = logging.getLogger("slimebus")

MAX_BYTES = 32 << 20
"""Of one file; a full one becomes the `.old` one in place of the one before, so a process keeps the last 200,000 spans or more."""


SCHEDSTAT = Path("/proc/thread-self/schedstat")


class Span:
    """A piece of work. about: what it was done to; may be added to while it goes on. seconds: how long it took, once it has ended."""

    def __init__(self, about: dict[str, Any]) -> None:
        self.about, self.seconds = about, 0.0


class Spans:
    """Appends spans to `directory/spans-PROCESS.jsonl`, from any thread; without a directory it only measures.

    `begin` is the wall clock, seconds since the epoch: across hosts it is as good as their clocks agree. `seconds` is not disturbed when
    that clock is set. A span costs some 30 us, with counts_cpu 120. One that cannot be written (a full disk) is lost and counted: a record
    is not worth a run.
    counts_cpu: each span also has the CPU seconds of its thread and, on Linux, `queued_s`, those in which it could have run but others
    had the CPU; what is left it waited for something. For a process whose spans do not await.
    """

    def __init__(self, directory: Path | None = None, process: str = "", *, counts_cpu: bool = False, max_bytes: int = MAX_BYTES) -> None:
        self.process, self.counts_cpu, self.max_bytes, self.num_lost = process, counts_cpu, max_bytes, 0
        self._path: Path | None = None
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            self._path = directory / f"spans-{process}.jsonl"
        self._lock = threading.Lock()

    @contextmanager
    def __call__(self, name: str, **about: Any) -> Iterator[Span]:
        """What is done inside is a span; one that raises is recorded too, with the exception's name as `failed`."""
        span = Span(about)
        before = thread_times() if self.counts_cpu else {}
        begin, started = time.time(), time.perf_counter()
        try:
            yield span
        except BaseException as bad:
            about["failed"] = type(bad).__name__
            raise
        finally:
            span.seconds = time.perf_counter() - started
            if self.counts_cpu:
                about |= {name: round(now - before[name], 6) for name, now in thread_times().items() if name in before}
            self._write(name, begin, span)

    def _write(self, name: str, begin: float, span: Span) -> None:
        if self._path is None:
            return
        row = {"process": self.process, "name": name, "begin": round(begin, 6), "seconds": round(span.seconds, 6), **span.about}
        line = json.dumps(row, separators=(",", ":")).encode() + b"\n"
        try:
            with self._lock:
                self._append(self._path, line)
        except OSError as bad:
            self.num_lost += 1
            if self.num_lost == 1:
                log.warning("spans cannot be written to %s and are lost: %s", self._path, bad)

    def _append(self, path: Path, line: bytes) -> None:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(file, line)
            full = os.fstat(file).st_size >= self.max_bytes
        finally:
            os.close(file)
        if full:
            path.replace(path.with_suffix(".old.jsonl"))


def thread_times() -> dict[str, float]:
    """Seconds since the calling thread began: on a CPU, and (where the kernel counts it) waiting for one."""
    times = {"cpu_s": time.thread_time()}
    with suppress(OSError, IndexError):
        times["queued_s"] = int(SCHEDSTAT.read_bytes().split()[1]) / 1e9
    return times
