"""The two stores keep the same promise; the one on disk survives."""

import fcntl
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from broker.store import LmdbStore, MemoryStore, Store, Write, lmdb_store, open_store
from broker.store.records import pack_frames, unpack_frames
from slimebus.bus.errors import UsageError


@pytest.fixture(params=["memory", "os", "fsync"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    opened = open_store(request.param, tmp_path / "store")
    yield opened
    opened.close()


def test_a_commit_writes_replaces_and_removes(store: Store) -> None:
    store.commit([Write("groups", "a", b"1"), Write("groups", "b", b"2")])
    store.commit([Write("groups", "a", b"3"), Write("groups", "b", None), Write("groups", "absent", None)])
    assert list(store.scan("groups")) == [("a", b"3")]
    assert list(store.keys("groups")) == ["a"]
    assert store.get("groups", "b") is None


def test_frames_are_kept_together_and_come_back_apart(store: Store) -> None:
    store.commit([Write("payloads", "a", [b"head", b"", b"x" * 10_000])])
    value = store.get("payloads", "a")
    assert value is not None
    assert [bytes(frame) for frame in unpack_frames(value)] == [b"head", b"", b"x" * 10_000]
    assert unpack_frames(pack_frames([])) == []


def test_tables_do_not_mix(store: Store) -> None:
    store.commit([Write("groups", "a", b"1"), Write("prompts", "a", b"2")])
    assert store.get("prompts", "a") == b"2"


def test_the_map_grows_by_itself(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path, is_synced=False, map_bytes=1 << 20)
    for i in range(8):
        store.commit([Write("payloads", str(i), b"x" * 900_000)])
    store.commit([Write("payloads", "large", b"y" * 40_000_000)])
    assert len(store.get("payloads", "large") or b"") == 40_000_000
    assert store.size_bytes() > 47_000_000
    store.close()
    again = LmdbStore(tmp_path, is_synced=False, map_bytes=1 << 20)
    assert len(list(again.scan("payloads"))) == 9
    again.close()


def test_an_unknown_format_is_refused_with_the_way_out(tmp_path: Path) -> None:
    LmdbStore(tmp_path, is_synced=False).close()
    with lmdb.open(str(tmp_path), max_dbs=9) as env, env.begin(write=True) as txn:
        txn.put(b"slimebus format", b"99")
    with pytest.raises(UsageError, match=r"format 99, this release reads 3.*new run directory"):
        LmdbStore(tmp_path, is_synced=False)


def test_a_second_broker_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path, is_synced=False)
    with pytest.raises(UsageError, match="another broker"):
        LmdbStore(tmp_path, is_synced=False)
    store.close()


def test_a_command_that_looks_whether_a_broker_works_here_does_not_refuse_one_that_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "owner.lock").open("w") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        monkeypatch.setattr(lmdb_store.time, "sleep", lambda seconds: fcntl.flock(looking, fcntl.LOCK_UN))
        LmdbStore(tmp_path, is_synced=False).close()


def test_memory_forgets() -> None:
    store = MemoryStore()
    store.commit([Write("groups", "a", b"123")])
    assert store.size_bytes() == 3
    assert MemoryStore().get("groups", "a") is None


def test_frames_come_back_as_frames_in_both_stores(store: Store) -> None:
    frames = [b"head", memoryview(b"y" * 5_000_000), b""]
    store.commit([Write("payloads", "a", frames)])
    assert [bytes(frame) for frame in store.frames("payloads", "a") or ()] == [bytes(frame) for frame in frames]
    assert unpack_frames(store.get("payloads", "a") or b"") == frames
    assert store.size_bytes() >= 5_000_000
    assert store.frames("payloads", "b") is None
