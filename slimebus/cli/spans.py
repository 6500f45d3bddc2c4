"""What a process was doing when: one JSON line for each piece of work, from which `slimebus trace` makes a timeline."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from slimebus.cli.metrics import JsonLines

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
    that clock is set. A span costs some 50 us, with counts_cpu 140.
    counts_cpu: each span also has the CPU seconds of its thread and, on Linux, `queued_s`, those in which it could have run but others
    had the CPU; what is left it waited for something. For a process whose spans do not await.
    """

    def __init__(self, directory: Path | None = None, process: str = "", *, counts_cpu: bool = False, max_bytes: int = MAX_BYTES) -> None:
        self.process, self.counts_cpu = process, counts_cpu
        self._rows = JsonLines(directory / f"spans-{process}.jsonl" if directory else None, max_bytes=max_bytes)

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
                about |= {key: round(now - before[key], 6) for key, now in thread_times().items() if key in before}
            times = {"begin": round(begin, 6), "seconds": round(span.seconds, 6)}
            self._rows.add({"process": self.process, "name": name, **times, **span.about})


def thread_times() -> dict[str, float]:
    """Seconds since the calling thread began: on a CPU, and (where the kernel counts it) waiting for one."""
    times = {"cpu_s": time.thread_time()}
    with suppress(OSError, IndexError):
        times["queued_s"] = int(SCHEDSTAT.read_bytes().split()[1]) / 1e9
    return times
