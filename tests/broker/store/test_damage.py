"""Damage on the disk is found and named; it is never used and never ends the process."""

import os
import random
from pathlib import Path

import pytest

from broker.inspect.reader import open_snapshot
from broker.inspect.verify import verify_run
from broker.store import Damaged, LmdbStore, Write, lmdb_store
from slimebus.bus.errors import UsageError

PAGE = 4096


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store of 300 groups with small and large records, after some deletes."""
    store = LmdbStore(tmp_path / "broker", is_synced=False)
    for i in range(300):
        store.commit([Write("groups", f"0/{i}", b"group %d" % i * 8), Write("payloads", f"0/{i}", [b"h" * 20, b"%d" % i * 6000])])
    store.commit([Write("payloads", f"0/{i}", None) for i in range(0, 300, 3)])
    store.close()
    return tmp_path / "broker"


def flip(folder: Path, position: int, mask: int = 0xFF) -> None:
    with (folder / "data.mdb").open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ mask]))


def used(folder: Path) -> bytes:
    """The part of the file in front of the hole at its end."""
    file = folder / "data.mdb"
    with file.open("rb") as opened:
        return opened.read(file.stat().st_blocks * 512)


def read_all(folder: Path) -> dict[tuple[str, str], bytes]:
    store = LmdbStore(folder, is_synced=False)
    try:
        return {(table, key): value for table in ("groups", "payloads") for key, value in store.scan(table)}
    finally:
        store.close()


def test_a_whole_store_is_found_whole(folder: Path) -> None:
    assert len(read_all(folder)) == 500


@pytest.mark.parametrize("place", [16, 20, 40])
def test_a_damaged_meta_page_is_refused_with_the_way_out(folder: Path, place: int) -> None:
    for page in (0, 1):  # LMDB uses the newer one
        flip(folder, page * PAGE + place)
    with pytest.raises(UsageError, match=r"damaged: .*buffer verify.*buffer export") as caught:
        read_all(folder)
    assert caught.value.code == "store_damaged"


@pytest.mark.parametrize("num_bytes", [1, 200_000_000, 256 * 1024 * 1024 - 5 * PAGE])
def test_a_file_that_was_cut_short_is_refused_with_the_way_out(folder: Path, num_bytes: int) -> None:
    size = (folder / "data.mdb").stat().st_size
    os.truncate(folder / "data.mdb", size - num_bytes)
    cut = rf"damaged: data.mdb was cut short: it has {size - num_bytes} of {size} bytes; `truncate -s {size} .*buffer verify"
    with pytest.raises(UsageError, match=cut):
        read_all(folder)
    with pytest.raises(UsageError, match=cut), open_snapshot(folder.parent):
        pass
    problems = verify_run(folder.parent).problems
    assert "cut short" in problems[0]
    assert not any(problem.startswith(":") for problem in problems)


def test_what_is_left_of_a_file_that_was_cut_short_can_be_read_when_it_is_as_long_as_before(folder: Path) -> None:
    file = folder / "data.mdb"
    size = file.stat().st_size
    os.truncate(file, used(folder).index(b"299" * 6000))
    os.truncate(file, size)
    with open_snapshot(folder.parent) as snapshot:
        assert len(list(snapshot.records.keys("groups"))) == 300
        assert isinstance(dict(snapshot.records.scan("payloads"))["0/299"], Damaged)
    assert any("0/299" in problem for problem in verify_run(folder.parent).problems)


def test_a_file_that_is_no_store_is_refused(folder: Path) -> None:
    (folder / "data.mdb").write_bytes(b"not a store" * 2000)
    with pytest.raises(UsageError, match="damaged"):
        read_all(folder)


def test_a_broker_that_ended_before_its_file_was_as_long_as_its_map_starts_again(tmp_path: Path) -> None:
    folder = tmp_path / "broker"
    folder.mkdir()
    lmdb_store.open_environment(folder, map_bytes=1 << 28).close()
    assert (folder / "data.mdb").stat().st_size < 1 << 28
    assert read_all(folder) == {}


def test_a_page_of_zeros_in_a_table_of_rows_is_refused_and_never_ends_the_broker(folder: Path) -> None:
    at = used(folder).index(b"group 7") // PAGE * PAGE
    with (folder / "data.mdb").open("r+b") as file:
        file.seek(at)
        file.write(bytes(PAGE))
    with pytest.raises(UsageError, match="damaged"):
        read_all(folder)


def test_flipped_bits_anywhere_are_a_finding_and_never_end_the_process(folder: Path) -> None:
    chance, found = random.Random(1), 0
    undamaged = verify_run(folder.parent).problems  # its rows are no groups
    for _ in range(12):
        at = chance.randrange(len(used(folder)) // PAGE) * PAGE
        flips = [(at + chance.randrange(120), 1 << chance.randrange(8)) for _ in range(8)]
        for position, mask in flips:
            flip(folder, position, mask)
        found += verify_run(folder.parent).problems != undamaged
        for position, mask in flips:
            flip(folder, position, mask)
    assert found > 5
    assert verify_run(folder.parent).problems == undamaged


def test_a_damaged_payload_is_found_when_it_is_read_and_others_are_whole(folder: Path) -> None:
    at = used(folder).index(b"100" * 6000) + 5000
    flip(folder, at)
    store = LmdbStore(folder, is_synced=False)
    with pytest.raises(Damaged, match=r"'0/100' of table 'payloads' is damaged") as caught:
        store.frames("payloads", "0/100")
    assert (caught.value.table, caught.value.key) == ("payloads", "0/100")
    assert store.frames("payloads", "0/101") is not None
    store.close()


def test_a_record_under_another_key_is_damage(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path / "broker", is_synced=False)
    store.commit([Write("groups", "0/1", b"one")])
    with store._env.begin(write=True) as txn:
        value = txn.get(b"0/1", db=store._tables["groups"])
        txn.put(b"0/2", value, db=store._tables["groups"])
    assert store.get("groups", "0/1") == b"one"
    with pytest.raises(Damaged):
        store.get("groups", "0/2")
    store.close()


def test_a_path_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "broker").write_text("a file")
    with pytest.raises(UsageError, match=r"needs a folder, but .*broker is a file"):
        LmdbStore(tmp_path / "broker", is_synced=False)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_store_whose_file_is_empty_or_gone_is_not_taken_for_a_new_one(folder: Path, is_there: bool) -> None:
    store = LmdbStore(folder, is_synced=False)
    store.announce("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")
    store.close()
    (folder / "data.mdb").unlink()
    if is_there:
        (folder / "data.mdb").touch()
    with pytest.raises(UsageError, match=r"data.mdb is missing or empty, though a broker has kept its state here"):
        LmdbStore(folder, is_synced=False)
