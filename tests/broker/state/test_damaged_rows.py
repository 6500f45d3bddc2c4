"""One damaged row costs at most what it held: the broker starts, the run goes on, and the row is named and counted."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from broker.state.groups import EVAL
from broker.state.rules import HeldOutSet
from broker.store import Damaged, LmdbStore, MemoryStore, Write
from broker.store.records import pack_frames, seal, unpack_frames
from slimebus.bus import messages as m
from slimebus.bus.errors import SlimebusError

GARBAGE = {"not msgpack": b"\xc1", "another type": b"\x93\x01\x02\x03", "of another": None, "checksum": b""}


@pytest.fixture
def running(begun_desk: Any) -> Any:
    """A run with a row in every table: step 0 trained, step 1 assigned, a group ready, one leased, one dead, one evaluated."""
    desk = begun_desk(max_attempts=1, max_staleness=2, eval_datasets={"held": HeldOutSet(num_prompts=2)}, eval_first=False)
    desk.join("c", "client")
    desk.join("critic", "consumer")
    assert desk.ask("c", m.Push(key="k"), bulk=[msgspec.msgpack.encode({"prompt": "a"})]).accepted == 1
    desk.fill(2)
    desk.train(0)
    desk.fill(2, 1)
    assert desk.batch(1)
    desk.fill(1, 1)
    (bad,) = desk.lease(1, 1)
    desk.ask("w", m.GiveBack(group=bad.group, lease=bad.lease, outcome="fail", reason="broken"))
    desk.lease(1, 1)
    desk.ask("critic", m.Read(count=1, wait_s=0.0))
    desk.ask("c", m.Evaluate(key="e", wait_s=0.0))
    desk.ask("c", m.Set(key="s", settings={"max_attempts": 1}))
    return desk


def break_row(desk: Any, table: str, key: str, how: str) -> None:
    """Damage a row as a disk or a bug would; `checksum`: as the store reports it."""
    rows = desk.store._tables[table]
    other = next((v for k, v in rows.items() if k != key), b"\x80")
    rows[key] = Damaged(table, key, "its checksum does not fit") if how == "checksum" else GARBAGE[how] or other


def keys(desk: Any, table: str) -> list[str]:
    return list(desk.store._tables[table])


@pytest.fixture
def scans_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryStore, "scan", lambda self, table: iter(sorted(self._tables[table].items())))


@pytest.mark.usefixtures("scans_damage")
@pytest.mark.parametrize("how", GARBAGE)
@pytest.mark.parametrize("table", ["groups", "ended", "clients", "steps", "evaluations", "consumers", "pushes", "changes"])
def test_a_damaged_row_costs_what_it_held_and_the_run_goes_on(running: Any, table: str, how: str) -> None:
    saved = {name: dict(value) for name, value in running.store._tables.items()}
    assert keys(running, table), "the run has a row in this table"
    for key in keys(running, table):
        running.store._tables.update({name: dict(value) for name, value in saved.items()})
        break_row(running, table, key, how)
        running.notes.clear()
        running.restart()
        running.pass_time(0.0)
        assert running.status["counted"][f"damaged rows of {table}"] == 1
        assert any(f"row {key!r} of table {table!r}" in note for note in running.notes)
        goes_on(running)
        running.notes.clear()
        running.restart()
        running.pass_time(0.0)
        assert not any("cannot be used" in note for note in running.notes), "the damaged row is gone or written anew"


def goes_on(desk: Any) -> None:
    """The trainer commits the step it has fetched and resumes; two more steps are trained, the evaluation ends."""
    for name, role in (("t", "trainer"), ("w", "rollout")):
        desk.join(name, role)
    desk.publish(2)
    assert desk.ask("t", m.Commit(step=1, checkpoint=0)) == m.Ok()
    desk.lineages = getattr(desk, "lineages", 0) + 1
    lineage = f"again {desk.lineages}"
    desk.begin(1, 1, lineage)
    for step in (1, 2):
        for _ in range(6):
            for group in desk.lease(4, step, lineage=lineage):
                desk.put(group, step, lineage=lineage)
        desk.train(step, lineage=lineage)
    assert desk.state.groups.count("queued", EVAL) == desk.state.groups.count("leased", EVAL) == 0


@pytest.mark.usefixtures("scans_damage")
@pytest.mark.parametrize("how", ["not msgpack", "another type", "checksum"])
def test_damaged_counters_stop_the_start(running: Any, how: str) -> None:
    break_row(running, "meta", "meta", how)
    with pytest.raises((SlimebusError, msgspec.DecodeError)):
        running.restart()


@pytest.mark.parametrize(
    "body", [b"", b"\x01", b"\xff\xff\xff\xff", pack_frames([b"abc"])[:-1], pack_frames([b"abc"]) + b"x", b"\x01\0\0\0" + b"\xff" * 8]
)
def test_a_record_whose_sizes_lie_is_damage(tmp_path: Path, body: bytes) -> None:
    with pytest.raises(Damaged):
        unpack_frames(body)
    store = LmdbStore(tmp_path / "broker", is_synced=False)
    store.commit([Write("payloads", "0/1", body)])
    with pytest.raises(Damaged, match=r"'0/1' of table 'payloads' is damaged") as caught:
        store.frames("payloads", "0/1")
    assert (caught.value.table, caught.value.key) == ("payloads", "0/1")
    store.close()


def test_a_scan_gives_the_rows_behind_a_damaged_one(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path / "broker", is_synced=False)
    store.commit([Write("groups", key, b"row") for key in "abc"])
    with store._env.begin(write=True) as txn:
        txn.put(b"b", seal("groups", "x", b"row"), db=store._tables["groups"])
    found = dict(store.scan("groups"))
    assert (found["a"], found["c"]) == (b"row", b"row")
    assert isinstance(found["b"], Damaged)
    store.close()


@pytest.mark.usefixtures("scans_damage")
@pytest.mark.parametrize("key", ["eval/", "eval/1", "eval/1/held", "eval/1/held/x", "eval/x/held/0", "eval/1/held/0/more"])
def test_a_damaged_row_under_a_key_of_no_known_form_is_deleted_and_the_broker_starts(running: Any, key: str) -> None:
    running.store._tables["groups"][key] = b"\xc1"
    running.restart()
    assert running.status["counted"]["damaged rows of groups"] == 1
    running.perform(running.machine.tick(running.now))
    assert key not in running.store._tables["groups"]
