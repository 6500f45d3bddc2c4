"""Spans to an OpenTelemetry collector, where its own environment variables name one. Needs slimebus[otel]."""

import logging
import os
from typing import Any

import xxhash

log = logging.getLogger("slimebus")

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

SEND_S = 2.0
"""How long a batch may take to be sent, repeats included. Without a collector a process takes so long to end, for each batch that waits."""
BATCH = 8192
"""Spans sent at once; more than four of these that wait are dropped, the oldest first."""


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
