"""What a process was doing when: one JSON line for each piece of work, from which `slimebus trace` makes a timeline."""

import logging
import math
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from slimebus.telemetry.metrics import JsonLines

log = logging.getLogger("slimebus")

MAX_BYTES = 32 << 20
"""Of one file; a full one becomes the `.old` one in place of the one before, so a process keeps the last 200,000 spans or more."""


NUM_CLOCKS = 8
"""Answers of the broker; the quickest of them tells its clock best (RFC 5905, section 10)."""
PHASES = {"queued": "queue", "leased": "lease"}
"""What a span of a phase is called, where not like it."""
SCHEDSTAT = Path("/proc/thread-self/schedstat")

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

SEND_S = 2.0
"""How long a batch may take to be sent, repeats included. Without a collector a process takes so long to end, for each batch that waits."""
BATCH = 8192
"""Spans sent at once; more than four of these that wait are dropped, the oldest first."""


class Span:
    """A piece of work that began at `begin`. about: what it was done to; may be added to while it goes on. seconds: how long it took, once
    it has ended."""

    def __init__(self, about: dict[str, Any]) -> None:
        self.about, self.begin, self.seconds = about, time.time(), 0.0


class Spans:
    """Appends spans to `directory/spans-PROCESS.jsonl`, from any thread; without a directory it only measures.

    `begin` is the wall clock, seconds since the epoch; `offset`, by how much the broker's is ahead of it, as far as is known. `seconds` is
    not disturbed when that clock is set. A span costs some 50 us, with counts_cpu 140.
    run: the run's name, for OpenTelemetry, which gets them too where the environment names a collector (Collector).
    counts_cpu: each span also has the CPU seconds of its thread and, on Linux, `queued_s`, those in which it could have run but others
    had the CPU; what is left it waited for something. For a process with spans that do not await.
    """

    def __init__(self, directory: Path | None = None, process: str = "", *, run: str = "", counts_cpu: bool = False) -> None:
        self.process, self.counts_cpu = process, counts_cpu
        self._rows = JsonLines(directory / f"spans-{process}.jsonl" if directory else None, max_bytes=MAX_BYTES)
        self._clocks: deque[tuple[float, float]] = deque(maxlen=NUM_CLOCKS)
        self._collector = collector_of(run, process) if directory else None

    def compare_clock(self, took_s: float, offset_s: float) -> None:
        """An answer of the broker that took so long says by how much its clock is ahead; of the last ones the quickest counts.

        It may be wrong by half of what it took: an offset within that is none, so that processes of one machine have none.
        """
        if math.isfinite(took_s) and math.isfinite(offset_s):
            self._clocks.append((took_s, offset_s if abs(offset_s) > took_s / 2 else 0.0))

    def record(self, name: str, begin: float, seconds: float, about: dict[str, Any]) -> None:
        """A span that is over."""
        offset = {"offset": round(min(self._clocks)[1], 6)} if self._clocks else {}
        times = {"begin": round(begin, 6), "seconds": round(seconds, 6)}
        if self._rows.path is not None:
            self._rows.add_line(msgspec.json.encode({"process": self.process, "name": name, **times, **offset, **about}))
        if self._collector is not None:
            for part in expanded(name, begin + offset.get("offset", 0.0), seconds, about):
                self._collector.send(*part)

    @contextmanager
    def __call__(self, name: str, **about: Any) -> Iterator[Span]:
        """What is done inside is a span; one that raises is recorded too, with the exception's name as `failed`."""
        span = Span(about)
        before = thread_times() if self.counts_cpu else {}
        started = time.perf_counter()
        try:
            yield span
        except BaseException as bad:
            about["failed"] = type(bad).__name__
            raise
        finally:
            span.seconds = time.perf_counter() - started
            if self.counts_cpu:
                about |= {key: round(now - before[key], 6) for key, now in thread_times().items() if key in before}
            self.record(name, span.begin, span.seconds, about)


def expanded(name: str, begin: float, seconds: float, about: dict[str, Any]) -> Iterator[tuple[str, float, float, dict[str, Any]]]:
    """A span as it is; of the broker's row of a step the spans of its groups."""
    if "lives" not in about:
        yield name, begin, seconds, about
    for group, (_, life) in about.get("lives", {}).items():
        for part, since, until in phases_of(life, about["train_s"], about["after_s"]):
            yield part, since + about["shift"], until - since, {"group": group, "step": about["step"]}


def phases_of(life: Sequence[Sequence[Any]], train_s: float, after_s: float) -> Iterator[tuple[str, float, float]]:
    """Name, begin and end of what a group was in, from the phases it came into; training ends after_s before the commit."""
    for (phase, begin), (following, end) in pairwise(life):
        if (phase, following) != ("assigned", "committed"):
            yield PHASES.get(phase, phase), begin, end
            continue
        trained_at = max(begin, end - after_s - train_s)
        yield "assigned", begin, trained_at
        yield "trained", trained_at, max(trained_at, end - after_s)


def thread_times() -> dict[str, float]:
    """Seconds since the calling thread began: on a CPU, and (where the kernel counts it) waiting for one."""
    times = {"cpu_s": time.thread_time()}
    with suppress(OSError, IndexError):
        times["queued_s"] = int(SCHEDSTAT.read_bytes().split()[1]) / 1e9
    return times


# --- to an OpenTelemetry collector, where its own environment variables name one; needs slimebus[otel] ---


class Collector:
    """Sends from a thread of its own; spans of one group, or of one step, are one trace whichever process they are of."""

    def __init__(self, run: str, process: str) -> None:
        """Raises ModuleNotFoundError where the packages are missing."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        about = {"service.name": "slimebus", "service.namespace": run, "service.instance.id": process}
        provider = TracerProvider(resource=Resource.create(about))
        exporter = OTLPSpanExporter(timeout=float(os.environ.get("OTEL_EXPORTER_OTLP_TIMEOUT", SEND_S)))
        provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=4 * BATCH, max_export_batch_size=BATCH))
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)  # not each try, but what was not sent
        self.run, self._tracer = run, provider.get_tracer("slimebus")

    def send(self, name: str, begin: float, seconds: float, about: dict[str, Any]) -> None:
        """A span that is over. begin: seconds since the epoch."""
        from opentelemetry import trace

        subject = f"group {about['group']}" if "group" in about else f"step {about['step']}" if "step" in about else name
        key = xxhash.xxh3_128_intdigest(f"{self.run}\n{subject}".encode())
        parent = trace.SpanContext(key or 1, (key >> 64) or 1, is_remote=True, trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED))
        context = trace.set_span_in_context(trace.NonRecordingSpan(parent))
        values = {key: value for key, value in about.items() if isinstance(value, str | bool | int | float)}
        span = self._tracer.start_span(name, context, attributes=values, start_time=int(begin * 1e9))
        span.end(int((begin + seconds) * 1e9))


def collector_of(run: str, process: str) -> Collector | None:
    """The collector that the environment names; None where it names none, or the packages are missing, which is logged."""
    if not any(os.environ.get(name) for name in ENDPOINTS):
        return None
    try:
        return Collector(run, process)
    except ModuleNotFoundError as absent:
        log.warning("no spans go to OpenTelemetry: %s is missing; pip install 'slimebus[otel]'", absent.name)
        return None
