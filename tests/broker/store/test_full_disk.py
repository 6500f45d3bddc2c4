"""A disk without room: samples are refused early, what frees room goes on, and nothing acknowledged is lost."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from small_disk import fill, small_disk

from broker.store import LmdbStore, StoreError, Write
from broker.store.lmdb_store import free_bytes

SAMPLES = b"s" * 200_000
MIB = 1 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 24) as folder:
        yield folder


@pytest.fixture
def store(disk: Path) -> Iterator[LmdbStore]:
    opened = LmdbStore(disk / "broker", is_synced=True)
    yield opened
    opened.close()


def fill_up(store: LmdbStore) -> int:
    """Put until the store refuses; the number of groups put."""
    for i in range(1000):
        if store.refusal(len(SAMPLES)):
            return i
        store.commit([Write("payloads", str(i), [SAMPLES]), Write("groups", str(i), b"ready")])
    raise AssertionError("never refused")


def test_samples_are_refused_before_the_last_byte_and_what_frees_room_still_goes(store: LmdbStore) -> None:
    count = fill_up(store)
    assert count > 50
    assert "full" in store.refusal(0)
    assert "make room there" in store.refusal(0)
    assert str(store.path) in store.refusal(0)
    assert free_bytes(store.path) > MIB, "a 16th of the disk is left to what frees room"
    for i in range(count):
        store.commit([Write("payloads", str(i), None), Write("groups", str(i), b"committed")])
    assert store.refusal(len(SAMPLES)) == "", "pages of the file that are free again count as room"
    assert [value for _, value in store.scan("groups")] == [b"committed"] * count


def test_samples_need_twice_their_size(store: LmdbStore) -> None:
    room = free_bytes(store.path) + store._spare_bytes()
    assert store.refusal(room // 2 - MIB) == ""
    assert "is full" in store.refusal(room // 2 + MIB)


def test_without_room_the_commit_fails_whole_and_succeeds_once_there_is_room(store: LmdbStore, disk: Path) -> None:
    store.commit([Write("groups", "a", b"1"), Write("payloads", "a", b"kept")])
    hog = fill(disk)
    writes = [Write("groups", "a", b"2"), Write("payloads", "a", None), Write("payloads", "b", [SAMPLES] * 20)]
    for _ in range(3):
        with pytest.raises(StoreError, match=r"is full: .* free and .* needed; make room there") as caught:
            store.commit(writes)
        assert caught.value.code == "disk_full"
        assert caught.value.retryable
    assert (store.get("groups", "a"), store.get("payloads", "a"), store.get("payloads", "b")) == (b"1", b"kept", None)
    hog.unlink()
    store.commit(writes)
    assert (store.get("groups", "a"), store.get("payloads", "a")) == (b"2", None)
    assert store.refusal(len(SAMPLES)) == ""


def test_the_hole_of_the_file_takes_no_room(store: LmdbStore) -> None:
    store.commit([Write("groups", "a", b"1")])
    found = (store.path / "data.mdb").stat()
    assert found.st_size > 200 * MIB
    assert found.st_blocks * 512 < MIB


def test_a_full_disk_at_the_start_says_so(disk: Path) -> None:
    fill(disk)
    with pytest.raises(Exception, match=r"store at .* (full|No space)"):
        LmdbStore(disk / "broker", is_synced=True)
