"""The timeline of a run, from the spans that its processes recorded: as Chrome trace events, and in a few numbers."""

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from slimebus.errors import DataError

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

Interval = tuple[float, float]


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
    found = [row for place in places for file in sorted((place / "metrics").glob("spans-*.jsonl")) for row in _rows(file)]
    if not found:
        raise DataError(f"{', '.join(map(str, places))}: no spans on record (metrics/spans-*.jsonl)")
    return sorted(found, key=lambda row: row.begin)


def _rows(file: Path) -> list[SpanRow]:
    rows = []
    for line in file.read_bytes().splitlines():
        try:
            row = msgspec.json.decode(line, type=dict[str, Any])
            own = [row.pop(name) for name in ("process", "name", "begin", "seconds")]
            rows.append(msgspec.convert(dict(zip(SpanRow.__struct_fields__, [*own, row], strict=True)), SpanRow))
        except (msgspec.MsgspecError, KeyError):
            continue
    return rows


# --- Chrome's trace events ---


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


# --- numbers ---


def overlap(spans: Sequence[SpanRow]) -> dict[str, Any]:
    """How the pulls and the sampling of the workers lie to the trainer's steps.

    Times in seconds, shares in 0..1; from the second step on: the first one allocates. `train_s`, `train_cpu_s`, `train_blocked_s`: with
    and without a pull in flight, [how many, lower quartile, median, upper quartile]. CPU seconds are those of the training thread; in the
    blocked ones it neither ran nor waited for a CPU, but for a lock, a disk, the network.
    """
    steps = [span for span in spans if span.name == "train" and span.process == "trainer"][1:]
    pulls = [span for span in spans if span.name == "pull" and "failed" not in span.about]
    if not steps:
        raise DataError("no trained step among the spans but the first")
    begin, end = steps[0].begin, max(step.end for step in steps)
    trained, pulled = merged(steps), merged(pulls)
    sampled = clipped(merged(span for span in spans if span.name == "sample"), begin, end)
    beside = [step for step in steps if _covered(step, pulled) > 0]
    alone = [step for step in steps if _covered(step, pulled) == 0]
    blocked = [span.seconds for span in spans if span.name == "publish" and "version" in span.about and begin <= span.begin]
    within = [pull for pull in pulls if begin <= pull.begin <= end]
    return {
        "seconds": end - begin,
        "steps": len(steps),
        **{
            name: {"with_pull": _quartiles(map(of, beside)), "without": _quartiles(map(of, alone))}
            for name, of in (("train_s", lambda s: s.seconds), ("train_cpu_s", _cpu_s), ("train_blocked_s", _blocked_s))
        },
        "publish_s": _quartiles(blocked),
        "publish_share": sum(blocked) / (end - begin),
        "encode_s": _quartiles(span.seconds for span in spans if span.name == "encode" and begin <= span.begin),
        "pull_s": _quartiles(pull.seconds for pull in within),
        "load_s": _quartiles(span.seconds for span in spans if span.name == "load" and begin <= span.begin),
        "training_share": measure(trained) / (end - begin),
        "sampling_share": measure(sampled) / (end - begin),
        "both_share": measure(common(trained, sampled)) / (end - begin),
        "pulls_beside_training": sum(_covered(pull, trained) > 0 for pull in within) / max(1, len(within)),
        "pulled_while_training": measure(common(trained, clipped(pulled, begin, end))) / (measure(clipped(pulled, begin, end)) or 1.0),
    }


def merged(spans: Iterable[SpanRow]) -> list[Interval]:
    """The moments at which at least one of them goes on, as intervals that do not touch, in order."""
    found: list[Interval] = []
    for begin, end in sorted((span.begin, span.end) for span in spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def clipped(intervals: Iterable[Interval], begin: float, end: float) -> list[Interval]:
    """What of them lies between `begin` and `end`."""
    return [(max(begin, a), min(end, b)) for a, b in intervals if a < end and b > begin]


def common(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """The moments that lie in both; each is in order and does not overlap itself."""
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            found.append((begin, end))
        i, j = (i + 1, j) if one[i][1] < other[j][1] else (i, j + 1)
    return found


def measure(intervals: Iterable[Interval]) -> float:
    """Seconds of intervals that do not overlap."""
    return sum(end - begin for begin, end in intervals)


def _covered(span: SpanRow, intervals: Iterable[Interval]) -> float:
    return measure(clipped(intervals, span.begin, span.end))


def _cpu_s(span: SpanRow) -> float:
    return float(span.about.get("cpu_s", 0.0))


def _blocked_s(span: SpanRow) -> float:
    return max(0.0, span.seconds - _cpu_s(span) - span.about["queued_s"]) if "queued_s" in span.about else 0.0


def _quartiles(values: Iterable[float]) -> list[float]:
    found = sorted(values)
    if len(found) < 2:
        return [len(found), *3 * found]
    return [len(found), *statistics.quantiles(found, n=4, method="inclusive")]
