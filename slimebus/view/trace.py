"""The timeline of a run, from the spans that its processes recorded, as Chrome trace events."""

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from slimebus.bus.errors import DataError
from slimebus.telemetry.spans import phases_of
from slimebus.view.report import read_rows

log = logging.getLogger("slimebus")

LANES = {
    "step": ("wait", "train", "publish", "save", "commit"),
    "versions": ("encode", "announce"),
    "weights": ("pull", "share", "load"),
    "groups": ("sample",),
}
"""What a process does one after the other is one lane; a span of another name has a lane of its own."""
LANE_OF = {name: lane for lane, names in LANES.items() for name in names}

WORK = ("generate", "reward", "put")
"""What a worker does with a group that it has leased."""
BROKER = "broker"
"""Its spans are rows of steps, each with the lives of its groups."""
LEAST_S = 1e-3
"""A hook that is done with a turn sooner called no tool."""
ROUNDING_S = 2e-6
"""Of recorded times."""


class SpanRow(msgspec.Struct, frozen=True):
    """One recorded span. begin: seconds since the epoch by the broker's clock, or where that is not known the clock of its host."""

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
        return str(self.about.get("sample") or LANE_OF.get(self.name, self.name))


class _Recorded(msgspec.Struct):
    """What a line of spans has."""

    process: str
    name: str
    begin: float
    seconds: float
    offset: float = 0.0
    group: str = ""
    turns: list[list[tuple[float, float]]] | None = None


class _RecordedStep(_Recorded, kw_only=True):
    step: int
    shift: float
    train_s: float
    after_s: float
    lives: dict[str, tuple[int, list[tuple[str, float]]]]


def _is_sound(row: dict[str, Any]) -> bool:
    try:
        msgspec.convert(row, _RecordedStep if "lives" in row else _Recorded)
    except msgspec.ValidationError:
        return False
    return True


def read(run_dirs: Iterable[Path]) -> list[SpanRow]:
    """All spans under these run directories (one for each host), by their begin. Raises DataError when there is none.

    A line that was cut off, by a kill or a full disk, is left out; so is one without the fields of a span, which is logged.
    """
    places = list(run_dirs)
    found = [row for place in places for row in _spans(place)]
    if not found:
        raise DataError(f"{', '.join(map(str, places))}: no spans on record (metrics/spans-*.jsonl)")
    return sorted(found, key=lambda row: row.begin)


def _spans(run_dir: Path) -> Iterator[SpanRow]:
    """Those of one host. What recorded no offset of its clock has the first of its process, or else of its host."""
    lines = [row for file in sorted((run_dir / "metrics").glob("spans-*.jsonl")) for row in read_rows(file)]
    rows = [row for row in lines if _is_sound(row)]
    if len(rows) < len(lines):
        log.warning("%s: %d lines of metrics/spans-*.jsonl are no spans and are left out", run_dir, len(lines) - len(rows))
    known = {row["process"]: row["offset"] for row in reversed(rows) if "offset" in row}
    of_host = next(iter(known.values()), 0.0)
    for row in rows:
        process, name, begin, seconds = (row.pop(key) for key in ("process", "name", "begin", "seconds"))
        offset = 0.0 if process == BROKER else row.pop("offset", known.get(process, of_host))
        yield SpanRow(process, name, begin + offset, seconds, row)


def work_spans(spans: Iterable[SpanRow]) -> list[SpanRow]:
    """What trainer and workers did, without the broker's records of steps, unless there is nothing else."""
    return [span for span in spans if span.process != BROKER] or list(spans)


def sample_lives(spans: Sequence[SpanRow], step: int) -> list[SpanRow]:
    """The life of each sample that a step trained, a lane each, and what trainer and workers did meanwhile. Raises DataError."""
    steps = {span.about["step"]: span.about for span in spans if span.process == BROKER and "lives" in span.about}
    if step not in steps:
        have = f"it has steps {min(steps)} to {max(steps)}" if steps else "it has none"
        raise DataError(f"step {step} is not on record in metrics/spans-broker.jsonl of the broker's run directory; {have}")
    about = steps[step]
    made: dict[str, list[SpanRow]] = {group: [] for group in about["lives"]}
    for span in spans:
        made.get(span.about.get("group", ""), []).append(span)
    found: list[SpanRow] = []
    for group, (num_samples, life) in about["lives"].items():
        of_group = _life(phases_of([(phase, at + about["shift"]) for phase, at in life], about["train_s"], about["after_s"]), made[group])
        for i in range(num_samples):
            for span in of_group:
                found += _turns(span, i, f"{group} sample {i}", f"samples of step {step}")
    if not found:
        raise DataError(f"step {step} has no spans on record: no sample of it, or none of what became of its groups")
    begin, end = min(span.begin for span in found), max(span.end for span in found)
    return sorted([*found, *(s for s in spans if s.process != BROKER and s.begin < end and s.end > begin)], key=lambda s: s.begin)


def _life(phases: Iterable[tuple[str, float, float]], made: Sequence[SpanRow]) -> list[SpanRow]:
    """The broker's phases of a group, and in place of a lease what the worker that had it then recorded until its end."""
    found = []
    for name, begin, end in phases:
        work = [s for s in made if name == "lease" and s.name in WORK and s.begin < end and s.end > begin]
        found += [msgspec.structs.replace(s, seconds=min(s.end, end) - s.begin) for s in work] or [
            SpanRow(BROKER, name, begin, end - begin, {})
        ]
    return found


def _turns(span: SpanRow, i: int, sample: str, process: str) -> Iterator[SpanRow]:
    """A span of a group as one of its sample i; where a hook generated, its turns, and between them its tools."""
    of_sample = (span.about.get("turns") or [[]])[i : i + 1]
    if not of_sample or not of_sample[0]:
        yield SpanRow(process, span.name, span.begin, span.seconds, {"sample": sample, "by": span.process})
        return
    done = 0.0
    for at, seconds in of_sample[0]:
        for name, since, until in (("tool", done, at), ("generate", at, at + seconds)):
            if until - since > LEAST_S:
                yield SpanRow(process, name, span.begin + since, until - since, {"sample": sample, "by": span.process})
        done = at + seconds


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
