"""Damage on the disk is found and named; it is never used and never ends the process."""

import random
from pathlib import Path

import pytest

from broker.buffer.verify import verify_run
from broker.store import Damaged, LmdbStore, Write
from broker.store.interface import TABLES
from broker.store.lmdb_store import check_readable
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


def read_all(folder: Path) -> dict[tuple[str, str], bytes]:
    store = LmdbStore(folder, is_synced=False)
    try:
        return {(table, key): value for table in ("groups", "payloads") for key, value in store.scan(table)}
    finally:
        store.close()


def test_a_whole_store_is_found_whole(folder: Path) -> None:
    check_readable(folder, TABLES)
    assert len(read_all(folder)) == 500


@pytest.mark.parametrize("place", [16, 20, 40])
def test_a_damaged_meta_page_is_refused_with_the_way_out(folder: Path, place: int) -> None:
    for page in (0, 1):  # LMDB uses the newer one
        flip(folder, page * PAGE + place)
    with pytest.raises(UsageError, match=r"damaged: .*buffer verify.*buffer export") as caught:
        read_all(folder)
    assert caught.value.code == "store_damaged"


def test_a_file_that_was_cut_short_is_refused_with_the_way_out(folder: Path) -> None:
    file = folder / "data.mdb"
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)
    with pytest.raises(UsageError, match=r"damaged: .*cut short.*buffer verify"):
        read_all(folder)
    [problem] = verify_run(folder).problems
    assert "SIGBUS" in problem
    file.write_bytes(b"not a store" * 2000)
    with pytest.raises(UsageError, match="damaged"):
        read_all(folder)


def test_flipped_bits_anywhere_are_a_finding_and_never_end_the_process(folder: Path) -> None:
    whole, chance, found = (folder / "data.mdb").read_bytes(), random.Random(1), 0
    for _ in range(25):
        torn = bytearray(whole)
        page = chance.randrange(len(torn) // PAGE)
        for _ in range(8):
            torn[page * PAGE + chance.randrange(120)] ^= 1 << chance.randrange(8)
        (folder / "data.mdb").write_bytes(torn)
        found += bool(verify_run(folder).problems)
    assert found > 5


def test_a_damaged_payload_is_found_when_it_is_read_and_others_are_whole(folder: Path) -> None:
    whole = (folder / "data.mdb").read_bytes()
    at = whole.index(b"100" * 6000) + 5000
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
    (folder / "data.mdb").unlink()
    if is_there:
        (folder / "data.mdb").touch()
    with pytest.raises(UsageError, match=r"data.mdb is missing or empty, though a broker has kept its state here"):
        check_readable(folder, TABLES)
