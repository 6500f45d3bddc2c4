"""Every record read, every index compared with what it speaks of."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from broker.buffer.reader import Moment
from broker.state.groups import ASSIGNED, COMMITTED, DEAD, DROPPED, EVAL, LEASED, QUEUED, READY, Group, field_key
from broker.state.records import ROWS, Meta, StepRecord
from broker.store.interface import TABLES, Damaged
from broker.store.records import unpack_frames
from slimebus.errors import ProtocolError
from slimebus.messages import GiveBack, Put
from slimebus.samples import decode_group

HOLDS_SAMPLES = (READY, ASSIGNED, COMMITTED)


class Report(msgspec.Struct):
    """What was read and what is wrong; empty `problems`: everything is as it was written."""

    problems: list[str] = []
    counts: dict[str, int] = {}
    states: dict[str, int] = {}
    size_bytes: int = 0


def verify(moment: Moment) -> Report:
    """Read every record: its checksum, its form, its samples, and that groups, prompts, samples and steps fit together."""
    report = Report()
    rows: dict[str, dict[str, Any]] = {table: dict(_rows(moment, table, kind, report)) for table, kind in ROWS.items()}
    groups: dict[str, Group] = rows["groups"]
    report.states = dict(Counter(g.phase for g in [*groups.values(), *rows["ended"].values()]))
    _check_groups(groups, rows["ended"], report)
    _check_steps(groups, rows["steps"], rows["meta"].get("meta"), report)
    _check_prompts(moment, groups, rows["ended"], report)
    _check_payloads(moment, groups, report)
    _check_partials(moment, groups, report)
    _check_fields(moment, groups, report)
    for _ in _records(moment, "source", report):
        pass  # its form is the source's own
    return report


def _rows(moment: Moment, table: str, kind: Any, report: Report) -> Iterator[tuple[str, Any]]:
    for key, value in _records(moment, table, report):
        try:
            yield key, msgspec.msgpack.decode(value, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as bad:
            report.problems.append(f"{table} {key}: does not decode: {bad}")


def _records(moment: Moment, table: str, report: Report) -> Iterator[tuple[str, bytes]]:
    """Every record of a table one by one, so that a damaged one does not hide those behind it."""
    assert table in TABLES
    try:
        keys = list(moment.keys(table))
    except Damaged as bad:
        report.problems.append(bad.text)
        return
    for key in keys:
        try:
            value = moment.get(table, key)
        except Damaged as bad:
            report.problems.append(bad.text)
            continue
        if value is not None:
            report.counts[table] = report.counts.get(table, 0) + 1
            report.size_bytes += len(value)
            yield key, value


def _check_groups(groups: dict[str, Group], ended: dict[str, Group], report: Report) -> None:
    for key, group in [*groups.items(), *ended.items()]:
        if group.id != key:
            report.problems.append(f"group {key}: its record says it is {group.id}")
    report.problems += [f"group {key}: in play and ended" for key in groups.keys() & ended.keys()]
    report.problems += [f"group {key}: {g.phase}, but listed as ended" for key, g in ended.items() if g.phase not in (DROPPED, DEAD)]
    report.problems += [f"group {key}: {g.phase}, but listed as in play" for key, g in groups.items() if g.phase in (DROPPED, DEAD)]
    leases = Counter(g.lease for g in groups.values() if g.phase == LEASED)
    report.problems += [f"lease {lease}: held by {count} groups" for lease, count in leases.items() if count > 1]


def _check_steps(groups: dict[str, Group], steps: dict[str, StepRecord], meta: Meta | None, report: Report) -> None:
    if meta is None:
        if groups or steps:
            report.problems.append("meta: the counters of the run are missing")
        return
    chosen: Counter[str] = Counter()
    for record in steps.values():
        if record.is_committed != (record.step < meta.next_step):
            report.problems.append(f"step {record.step}: committed is {record.is_committed}, but the next step is {meta.next_step}")
        wanted = COMMITTED if record.is_committed else ASSIGNED
        for name in record.groups if record.step >= meta.floor else ():
            chosen[name] += 1
            group = groups.get(name)
            if group is None or (group.phase, group.step) != (wanted, record.step):
                is_now = "missing" if group is None else f"{group.phase} of step {group.step}"
                report.problems.append(f"step {record.step}: its group {name} is {is_now}")
    report.problems += [f"group {name}: in {count} steps" for name, count in chosen.items() if count > 1]
    lost = [name for name, g in groups.items() if g.phase in (ASSIGNED, COMMITTED) and name not in chosen]
    report.problems += [f"group {name}: {groups[name].phase}, but in no step" for name in lost]


def _check_prompts(moment: Moment, groups: dict[str, Group], ended: dict[str, Group], report: Report) -> None:
    seen = set()
    for key, value in _records(moment, "prompts", report):
        seen.add(key)
        _try(report, f"prompt of group {key}", lambda value=value: msgspec.msgpack.decode(value))  # type: ignore[misc]
    needed = {n for n, g in groups.items() if g.kind != EVAL} | {n for n, g in ended.items() if g.phase == DEAD}
    report.problems += [f"group {name}: its prompt is missing" for name in _missing(moment, "prompts", needed - seen)]


def _missing(moment: Moment, table: str, names: set[str]) -> list[str]:
    """Those that have no record; one that is there and damaged was reported as such."""
    return sorted(names - set(moment.keys(table))) if names else []


def _check_payloads(moment: Moment, groups: dict[str, Group], report: Report) -> None:
    seen = set()
    for key, value in _records(moment, "payloads", report):
        seen.add(key)
        group = groups.get(key)
        if group is None or group.phase not in HOLDS_SAMPLES:
            report.problems.append(f"samples of group {key}: the group is {group.phase if group else 'not in play'}")
            continue
        frames = unpack_frames(value)
        if len(frames) != group.num_frames:
            report.problems.append(f"samples of group {key}: {len(frames)} frames, its row says {group.num_frames}")
        _try(report, f"samples of group {key}", lambda frames=frames: _decode(frames, Put))  # type: ignore[misc]
    needed = {name for name, g in groups.items() if g.phase in HOLDS_SAMPLES}
    report.problems += [f"group {name}: its samples are missing" for name in _missing(moment, "payloads", needed - seen)]


def _check_partials(moment: Moment, groups: dict[str, Group], report: Report) -> None:
    for key, value in _records(moment, "partials", report):
        group = groups.get(key)
        if group is None or group.phase not in (QUEUED, LEASED):
            report.problems.append(f"partial of group {key}: the group is {group.phase if group else 'not in play'}")
        _try(report, f"partial of group {key}", lambda value=value: _decode(unpack_frames(value), GiveBack))  # type: ignore[misc]


def _check_fields(moment: Moment, groups: dict[str, Group], report: Report) -> None:
    seen = {key for key, _ in _records(moment, "fields", report)}
    needed = {field_key(g.id, field.name) for g in groups.values() for field in g.late}
    report.problems += [f"late field {key!r}: no group has it" for key in sorted(seen - needed)]
    report.problems += [f"late field {key!r}: it is missing" for key in _missing(moment, "fields", needed - seen)]


def _decode(frames: list[memoryview], kind: Any) -> None:
    header = msgspec.msgpack.decode(frames[0], type=kind)
    decode_group(header.samples, header.fields, frames[1:])


def _try(report: Report, what: str, read: Callable[[], Any]) -> None:
    try:
        read()
    except (msgspec.DecodeError, UnicodeDecodeError, ProtocolError, ValueError) as bad:
        report.problems.append(f"{what}: {bad}")
