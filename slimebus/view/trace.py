"""The timeline of a run, from the spans that its processes recorded, as Chrome trace events."""

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from slimebus.bus.errors import DataError
from slimebus.view.report import read_rows

LANES = {
    "step": ("wait", "train", "publish", "save", "commit"),
    "versions": ("encode", "announce"),
    "weights": ("pull", "share", "load"),
    "groups": ("sample",),
}
"""What a process does one after the other is one lane; a span of another name has a lane of its own."""
LANE_OF = {name: lane for lane, names in LANES.items() for name in names}

ROUNDING_S = 2e-6
"""Of recorded times."""


class SpanRow(msgspec.Struct, frozen=True):
    """One recorded span. begin: seconds since the epoch by the clock of its host."""

    process: str
    name: str
    begin: float
    seconds: float
    about: dict[str, Any]

    @property
    def end(self) -> float:
        """When it ended, by the same clock."""
        return self.begin + self.seconds

    @property
    def lane(self) -> str:
        """Which of its process's lanes it belongs to."""
        return LANE_OF.get(self.name, self.name)


def read(run_dirs: Iterable[Path]) -> list[SpanRow]:
    """All spans under these run directories (one for each host), by their begin. Raises DataError when there is none.

    A line that was cut off, by a kill or a full disk, is left out.
    """
    places = list(run_dirs)
    found = [row for place in places for file in sorted((place / "metrics").glob("spans-*.jsonl")) for row in _spans(file)]
    if not found:
        raise DataError(f"{', '.join(map(str, places))}: no spans on record (metrics/spans-*.jsonl)")
    return sorted(found, key=lambda row: row.begin)


def _spans(file: Path) -> Iterator[SpanRow]:
    for row in read_rows(file):
        with contextlib.suppress(KeyError):  # a line that two writers cut in half
            yield SpanRow(**{name: row.pop(name) for name in ("process", "name", "begin", "seconds")}, about=row)


def chrome_trace(spans: Sequence[SpanRow]) -> dict[str, Any]:
    """The trace-event format that Perfetto and chrome://tracing open: a track for each process, in it one for each lane.

    Times are microseconds since the first span. Groups that are sampled at the same time take as many tracks as there are of them.
    """
    start = spans[0].begin
    events: list[dict[str, Any]] = []
    for pid, process in enumerate(processes(spans), 1):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}})
        own = [span for span in spans if span.process == process]
        tid = 0
        for lane in sorted({span.lane for span in own}, key=_rank):
            for row in rows_of([span for span in own if span.lane == lane]):
                tid += 1
                events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": lane}})
                events.append({"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}})
                events += [_event(span, pid, tid, start) for span in row]
    return {"displayTimeUnit": "ms", "otherData": {"begin": start}, "traceEvents": events}


def processes(spans: Iterable[SpanRow]) -> list[str]:
    """Their names: the trainer's ranks first."""
    return sorted({span.process for span in spans}, key=lambda name: (not name.startswith("trainer"), name))


def _rank(lane: str) -> tuple[int, str]:
    return (list(LANES).index(lane) if lane in LANES else len(LANES), lane)


def rows_of(spans: Iterable[SpanRow]) -> list[list[SpanRow]]:
    """The spans in as few rows as it takes for none to overlap another of its row."""
    rows: list[list[SpanRow]] = []
    for span in sorted(spans, key=lambda s: s.begin):
        row = next((row for row in rows if row[-1].end <= span.begin + ROUNDING_S), None)
        if row is None:
            rows.append([span])
        else:
            row.append(span)
    return rows


def _event(span: SpanRow, pid: int, tid: int, start: float) -> dict[str, Any]:
    times = {"ts": round(1e6 * (span.begin - start), 1), "dur": round(1e6 * span.seconds, 1)}
    return {"ph": "X", "name": span.name, "cat": span.lane, "pid": pid, "tid": tid, **times, "args": span.about}


def write_chrome(spans: Sequence[SpanRow], out: Path) -> None:
    """Write `chrome_trace` as JSON, making its folder."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(chrome_trace(spans), separators=(",", ":")) + "\n")
