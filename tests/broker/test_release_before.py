"""What earlier releases wrote and said: this one opens their stores and goes on with the run, and takes the requests of their clients.

golden/RELEASE/   session.xz    the requests of a run that uses everything, as bytes, each with the type of its answer: msgpack
                  data.mdb.xz   the store that this run leaves

`SLIMEBUS_WRITE_GOLDEN=1 pytest tests/broker/test_release_before.py` writes those of the present release, where there are none yet: once a
release. They are never changed; a release that cannot open them says so in its notes and with another FORMAT.
"""

import lzma
import os
import struct
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from made_samples import frames, made

from broker.inspect.reader import open_snapshot
from broker.inspect.verify import verify
from broker.request_loop import RESTORED_TABLES
from broker.state.effects import Address, Event
from broker.state.groups import COMMITTED, LEASED, QUEUED
from broker.state.rules import HeldOutSet
from broker.store import LmdbStore, Write
from broker.store.interface import TABLES
from slimebus.bus import envelope
from slimebus.bus import messages as m

GOLDEN, ROOT = Path(__file__).parent / "golden", Path(__file__).parents[2]
RELEASE: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
MAP_BYTES = 1 << 20
HELD = {"held": HeldOutSet(num_prompts=1)}
RULES: dict[str, Any] = {"eval_datasets": HELD, "max_attempts": 1, "max_staleness": 4, "buffer_capacity": 64}
Session = list[tuple[list[bytes], str]]


class Recorder:
    """A desk that keeps the bytes of what is asked of it."""

    def __init__(self, desk: Any) -> None:
        self.desk, self.session = desk, Session()
        self._send, desk.send = desk.send, self.send

    def send(self, name: str, message: m.Message, *, epoch: int | None = None, bulk: list[bytes] | None = None, **how: Any) -> int:
        number = self._send(name, message, epoch=epoch, bulk=bulk, **how)
        said_epoch = self.desk.epochs.get(name, 0) if epoch is None else epoch
        header = envelope.encode(message, id=number, run="r", sender=name, epoch=said_epoch)
        self.session.append(([header, *(bulk or [])], m.wire_name(type(self.desk.answers[number]))))
        return int(number)


def live(desk: Any) -> None:
    """A run that leaves something of everything that a store keeps."""
    desk.begin()
    desk.ask("w", m.Heartbeat(state="serving", lineage="L", serving=0, metrics={"tokens": 7.0}))
    (held,) = desk.lease()
    desk.put(held)
    desk.join("critic", "consumer")
    desk.join("c", "client")
    desk.ask("c", m.Push(key="pushed"), bulk=[msgspec.msgpack.encode({"prompt": "2+2=", "label": "4", "metadata": {}})])
    desk.ask("c", m.Set(key="changed", settings={"max_staleness": 8.0}))
    desk.fill(2)
    assert len(desk.train(0)) == 2
    late, *_ = [*desk.lease(4, serving=1)]
    desk.put(late, version=1)
    field = msgspec.msgpack.encode([m.Field(name="values", dtype="float32", shapes=[[4]])])
    desk.ask("critic", m.Read(count=8, wait_s=0.0))
    desk.ask("critic", m.PutFields(group=late.group, lease=late.lease), bulk=[field, struct.pack("<4f", 1, 2, 3, 4)])
    desk.fill(2, version=1)
    assert len(desk.batch(1)) == 2
    dead, dropped, begun, returned = desk.lease(4, serving=1)
    for group, outcome in ((dead, "fail"), (dropped, "drop"), (returned, "requeue")):
        desk.ask("w", m.GiveBack(group=group.group, lease=group.lease, outcome=outcome, reason="r"))
    partial = m.GiveBack(group=begun.group, lease=begun.lease, outcome="partial", reason="worker left", lineage="L")
    desk.ask("w", partial, bulk=frames(made((-1, 1), (1, 2))))
    desk.ask("c", m.Evaluate(key="asked", wait_s=0.0))


@pytest.mark.skipif(not os.environ.get("SLIMEBUS_WRITE_GOLDEN"), reason="writes the golden files of this release")
def test_write_golden_files_of_this_release(new_desk: Any, tmp_path: Path) -> None:
    folder = GOLDEN / RELEASE
    if folder.exists():
        pytest.skip(f"{folder} is there; golden files never change")
    recorder = Recorder(new_desk(**RULES))
    live(recorder.desk)
    store = LmdbStore(tmp_path, is_synced=True, map_bytes=MAP_BYTES)
    memory = recorder.desk.store
    store.commit([Write(table, key, value) for table in TABLES for key, value in memory._tables[table].items()])
    store.close()
    folder.mkdir(parents=True)
    (folder / "session.xz").write_bytes(lzma.compress(msgspec.msgpack.encode(recorder.session)))
    (folder / "data.mdb.xz").write_bytes(lzma.compress((tmp_path / "data.mdb").read_bytes()))


def test_this_release_has_golden_files() -> None:
    assert (GOLDEN / RELEASE).is_dir(), "SLIMEBUS_WRITE_GOLDEN=1 pytest tests/broker/test_release_before.py writes them"


@pytest.mark.parametrize("folder", sorted(GOLDEN.glob("*")), ids=lambda folder: folder.name)
def test_the_store_of_a_release_is_opened_whole_and_its_run_goes_on(folder: Path, new_desk: Any, tmp_path: Path, closing: Any) -> None:
    (tmp_path / "broker").mkdir()
    (tmp_path / "broker" / "data.mdb").write_bytes(lzma.decompress((folder / "data.mdb.xz").read_bytes()))
    with open_snapshot(tmp_path) as snapshot:
        found = verify(snapshot.records)
    assert found.problems == []
    assert set(found.states) >= {"queued", "leased", "ready", "assigned", "committed", "dropped", "dead"}
    assert set(found.counts) >= {*RESTORED_TABLES, "payloads", "prompts", "partials", "fields"} - {"source"}
    desk = new_desk(**RULES)
    desk.store, desk.first_id = closing(LmdbStore(tmp_path / "broker", is_synced=False)), 1000
    desk.restart()
    assert not [note for note in desk.notes if "damaged" in note]
    assert desk.status["settings"]["max_staleness"] == 8
    desk.begin(step=1, version=1, lineage="M")
    desk.fill(4, version=1, lineage="M")
    for step in (1, 2):
        assert desk.train(step, checkpoint=step, lineage="M")
    assert (desk.status["step"], desk.status["oldest_checkpoint"]) == (3, 2)
    desk.state.validate()
    assert verify(desk.store).problems == []


@pytest.mark.parametrize("folder", sorted(GOLDEN.glob("*")), ids=lambda folder: folder.name)
def test_the_requests_of_a_release_are_answered_as_they_were_then(folder: Path, new_desk: Any) -> None:
    session = msgspec.msgpack.decode(lzma.decompress((folder / "session.xz").read_bytes()), type=Session)
    desk = new_desk(**RULES)
    for said, answer in session:
        got = envelope.decode(said)
        to = Address(got.header.sender.encode(), got.header.id)
        event = Event(to=to, sender=got.header.sender, epoch=got.header.epoch, run=got.header.run, message=got.message, bulk=got.bulk)
        desk.perform(desk.machine.apply([event], desk.now))
        assert m.wire_name(type(desk.answers[got.header.id])) == answer, desk.answers[got.header.id]
    groups = desk.status["groups"]
    assert (groups[COMMITTED], groups["dead"], groups["dropped"]) == (2, 1, 1)
    assert groups[QUEUED]
    assert groups[LEASED]
