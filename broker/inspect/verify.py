"""Every record read, every index compared with what it speaks of; in a process of its own, which damage may end."""

import functools
import logging
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec

from broker.state.damage import decode_row
from broker.state.groups import ASSIGNED, COMMITTED, DEAD, DROPPED, EVAL, LEASED, QUEUED, WITH_SAMPLES, Group, field_key
from broker.state.records import ROWS, Meta, StepRecord
from broker.store import KINDS, Damaged, Records
from broker.store.interface import ended_by
from broker.store.records import unpack_frames
from slimebus.bus.errors import SlimebusError, UsageError
from slimebus.bus.sample_table import check_group

log = logging.getLogger("slimebus.broker")


class VerifyReport(msgspec.Struct):
    """What was read and what is wrong; empty `problems`: everything is as it was written."""

    problems: list[str] = []
    counts: dict[str, int] = {}
    states: dict[str, int] = {}
    size_bytes: int = 0


def verify_run(run_dir: Path, durability: str = "fsync") -> VerifyReport:
    """Verify the store of a run in a child process; that it crashed is then a problem like others. Raises UsageError for no store."""
    folder = run_dir / "broker"
    problems = []
    try:
        with KINDS[durability].read(folder):
            pass
    except UsageError as bad:
        if bad.code != "store_damaged":
            raise
        problems.append(bad.text)
    command = [sys.executable, "-P", "-m", "broker.inspect.verify", str(folder), durability]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode == 0:
        report = msgspec.json.decode(done.stdout, type=VerifyReport)
    else:
        last_words = done.stderr.decode(errors="replace").strip().rpartition("\n")[2] or "opening the store"
        report = VerifyReport(problems=[f"{last_words}: {ended_by(done.returncode)}; nothing behind it was read"])
    report.problems = [*problems, *report.problems]
    return report


def verify(records: Records) -> VerifyReport:
    """Read every record: its checksum, its form, its samples, and that groups, prompts, samples and steps fit together."""
    report = VerifyReport()
    rows: dict[str, dict[str, Any]] = {table: dict(_rows(records, table, report)) for table in ROWS}
    groups: dict[str, Group] = rows["groups"]
    ended: dict[str, Group] = rows["ended"]
    report.states = dict(Counter(g.phase for g in [*groups.values(), *ended.values()]))
    report.problems += _group_problems(groups, ended)
    report.problems += _step_problems(groups, rows["steps"], rows["meta"].get("meta"))

    def check_samples(key: str, value: bytes) -> None:
        frames = unpack_frames(value, "payloads", key)
        if len(frames) != groups[key].num_frames:
            raise Damaged("payloads", key, f"{len(frames)} frames, its row says {groups[key].num_frames}")
        check_group(frames)

    with_prompt = {n for n, g in groups.items() if g.kind != EVAL} | {n for n, g in ended.items() if g.phase == DEAD}
    with_samples = {name for name, g in groups.items() if g.phase in WITH_SAMPLES}
    to_sample = {name for name, g in groups.items() if g.phase in (QUEUED, LEASED)}
    late = {field_key(g.id, field.name) for g in groups.values() for field in g.late}
    check = functools.partial(_check_values, records, report)
    check("prompts", lambda key, value: msgspec.msgpack.decode(value), needed=with_prompt)
    check("payloads", check_samples, needed=with_samples, allowed=with_samples)
    check("partials", lambda key, value: check_group(unpack_frames(value, "partials", key)), allowed=to_sample)
    check("fields", lambda key, value: None, needed=late, allowed=late)
    check("source", lambda key, value: None)  # its form is the source's own
    return report


Keys = Collection[str]


def _check_values(
    records: Records,
    report: VerifyReport,
    table: str,
    read: Callable[[str, bytes], object],
    *,
    needed: Keys = (),
    allowed: Keys | None = None,
) -> None:
    """Read a table record by record. needed: keys that it must have, allowed: that it may have; None: any."""
    for key, value in _records(records, table, report):
        if allowed is not None and key not in allowed:
            report.problems.append(f"{table} {key}: no group needs it")
            continue
        try:
            read(key, value)
        except (msgspec.DecodeError, UnicodeDecodeError, SlimebusError, ValueError) as bad:
            report.problems.append(f"{table} {key}: {bad}")
    missing = set(needed).difference(_keys(records, table, report) if needed else ())
    report.problems += [f"{table} {key}: it is missing, and its group needs it" for key in sorted(missing)]


def _rows(records: Records, table: str, report: VerifyReport) -> Iterator[tuple[str, Any]]:
    for key, value in _records(records, table, report):
        try:
            yield key, decode_row(table, key, value)
        except (msgspec.DecodeError, UnicodeDecodeError, SlimebusError) as bad:
            report.problems.append(f"{table} {key}: cannot be used: {bad}")


def _records(records: Records, table: str, report: VerifyReport) -> Iterator[tuple[str, bytes]]:
    """Every record of a table one by one, so that a damaged one does not hide those behind it."""
    log.debug("reading table %s", table)
    for key in _keys(records, table, report):
        try:
            value = records.get(table, key)
        except Damaged as bad:
            report.problems.append(bad.text)
            continue
        if value is not None:
            report.counts[table] = report.counts.get(table, 0) + 1
            report.size_bytes += len(value)
            yield key, value


def _keys(records: Records, table: str, report: VerifyReport) -> list[str]:
    try:
        return list(records.keys(table))
    except Damaged as bad:
        report.problems.append(bad.text)
        return []


def _group_problems(groups: dict[str, Group], ended: dict[str, Group]) -> Iterator[str]:
    for table, rows in (("in play", groups), ("ended", ended)):
        for key, group in rows.items():
            if (group.phase in (DROPPED, DEAD)) != (table == "ended"):
                yield f"group {key}: {group.phase}, but listed as {table}"
    yield from (f"group {key}: in play and ended" for key in groups.keys() & ended.keys())
    leases = Counter(g.lease.id for g in groups.values() if g.phase == LEASED)
    yield from (f"lease {lease}: held by {count} groups" for lease, count in leases.items() if count > 1)


def _step_problems(groups: dict[str, Group], steps: dict[str, StepRecord], meta: Meta | None) -> Iterator[str]:
    if meta is None:
        if groups or steps:
            yield "meta: the counters of the run are missing"
        return
    chosen: Counter[str] = Counter()
    for record in steps.values():
        if record.is_committed != (record.step < meta.next_step):
            yield f"step {record.step}: committed is {record.is_committed}, but the next step is {meta.next_step}"
        wanted = COMMITTED if record.is_committed else ASSIGNED
        for name in record.groups:
            group = groups.get(name)
            if group is None and record.step < meta.oldest_kept_step:
                continue  # freed; the rest of its step follows
            chosen[name] += 1
            if group is None or (group.phase, group.step) != (wanted, record.step):
                yield f"step {record.step}: its group {name} is {'missing' if group is None else f'{group.phase} of step {group.step}'}"
    yield from (f"group {name}: in {count} steps" for name, count in chosen.items() if count > 1)
    lost = [group for name, group in groups.items() if group.phase in (ASSIGNED, COMMITTED) and name not in chosen]
    yield from (f"group {group.id}: {group.phase}, but in no step" for group in lost)


def main(folder: Path, durability: str) -> None:
    """Print the report as JSON; stderr names each table before it is read."""
    logging.basicConfig(level=logging.DEBUG, format="%(message)s")
    try:
        with KINDS[durability].read(folder, is_checked=False) as records:
            report = verify(records)
    except UsageError as bad:
        report = VerifyReport(problems=[bad.text])
    sys.stdout.buffer.write(msgspec.json.encode(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
