"""Damage on the disk is found and named; it is never used and never ends the process."""

import os
import random
import subprocess
import sys
from pathlib import Path

import lmdb
import pytest

from broker.inspect.reader import open_snapshot
from broker.inspect.verify import verify_run
from broker.store import Damaged, LmdbStore, Write, read_probe
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
    check_readable(folder)
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
    pages, problem = verify_run(folder).problems
    assert "cut short" in pages
    assert "SIGBUS" in problem
    assert not problem.startswith(":")
    file.write_bytes(b"not a store" * 2000)
    with pytest.raises(UsageError, match="damaged"):
        read_all(folder)


def tree_pages(folder: Path) -> list[int]:
    """Numbers of the pages in use that a tree is made of, and of one within a long list of free pages."""
    with lmdb.open(str(folder), readonly=True) as env:
        file = read_probe.PageFile(folder / "data.mdb", PAGE, env.info()["last_txnid"])
    lists = [bytes(pages) for pages in file.free_lists()]
    free = {page for pages in lists for page in memoryview(pages).cast("Q")}
    whole = (folder / "data.mdb").read_bytes()
    headers = [(page, read_probe.PAGE.unpack_from(whole, page * PAGE)) for page in range(2, file.num_pages) if page not in free]
    file.close()
    in_list = (whole.index(max(lists, key=len)) + PAGE) // PAGE
    return [in_list, *(page for page, (number, _, flags, _, _) in headers if number == page and flags in (1, 2))]


def zero(folder: Path, page: int) -> None:
    with (folder / "data.mdb").open("r+b") as file:
        file.seek(page * PAGE)
        file.write(bytes(PAGE))


USE = """
import sys
from pathlib import Path
from broker.store import LmdbStore, Write
from slimebus.bus.errors import SlimebusError
try:
    store = LmdbStore(Path(sys.argv[1]), is_synced=False)
    for round in range(3):
        for i in range(0, 40, 2):
            store.commit([Write("payloads", f"0/{i}", None), Write("groups", f"0/{i}", b"x" * 900 * round)])
        store.commit([Write("payloads", f"1/{i}", [b"y" * 9000]) for i in range(40)])
    list(store.scan("payloads"))
except SlimebusError as bad:
    sys.exit(bad.text)
"""


def use(folder: Path) -> subprocess.CompletedProcess[str]:
    """Open, write and read a store as a broker does."""
    return subprocess.run([sys.executable, "-c", USE, str(folder)], capture_output=True, text=True, check=False)


def small_store(path: Path) -> Path:
    """A store of 40 groups with free pages in the middle and a list of them in an overflow page."""
    store = LmdbStore(path, is_synced=False)
    store.commit([Write("payloads", f"9/{i}", [b"z" * 9000]) for i in range(400)])
    store.commit([Write("groups", f"0/{i}", b"group %d" % i * 100) for i in range(40)])
    store.commit([Write("payloads", f"0/{i}", [b"h" * 20, b"%d" % i * 6000]) for i in range(40)])
    store.commit([Write("payloads", f"9/{i}", None) for i in range(400)])
    store.close()
    return path


@pytest.mark.parametrize("num_pages", [1, 2, 5])
def test_a_file_that_lost_its_last_pages_is_refused_though_its_tables_can_be_walked(tmp_path: Path, num_pages: int) -> None:
    folder = tmp_path / "broker"
    store = LmdbStore(folder, is_synced=False)
    for i in range(20):
        store.commit([Write("groups", f"0/{i}", b"group"), Write("payloads", f"0/{i}", [b"x" * 50_000])])
    store.close()
    size = (folder / "data.mdb").stat().st_size
    os.truncate(folder / "data.mdb", size - num_pages * PAGE)
    with pytest.raises(UsageError, match=r"damaged: data.mdb was cut short: .*buffer verify"):
        check_readable(folder)
    assert verify_run(folder).problems[0].startswith("data.mdb was cut short")
    with pytest.raises(UsageError, match=f"truncate -s {size} "), open_snapshot(folder):
        pass
    os.truncate(folder / "data.mdb", size)
    store = LmdbStore(folder, is_synced=False)
    with pytest.raises(Damaged):
        store.get("payloads", "0/19")
    store.commit([Write("payloads", f"0/{i}", None) for i in range(20)])
    store.close()


def test_a_file_that_ends_before_pages_that_were_never_written_is_whole(tmp_path: Path) -> None:
    folder = tmp_path / "broker"
    store = LmdbStore(folder, is_synced=False)
    store.commit([Write("groups", "0/1", b"group")])
    with store._env.begin(write=True) as txn:
        txn.put(b"large", b"x" * 500_000, db=store._tables["payloads"])
        txn.put(b"other", b"x" * 5_000, db=store._tables["payloads"])
        txn.delete(b"large", db=store._tables["payloads"])
        txn.delete(b"other", db=store._tables["payloads"])
    last_page = store._env.info()["last_pgno"]
    store.close()
    assert (folder / "data.mdb").stat().st_size < (last_page + 1) * PAGE
    check_readable(folder)
    assert use(folder).returncode == 0


def test_a_page_of_zeros_in_any_table_or_in_the_list_of_free_pages_is_refused_and_never_ends_the_broker(tmp_path: Path) -> None:
    folder = small_store(tmp_path / "broker")
    whole, refused = (folder / "data.mdb").read_bytes(), 0
    assert use(folder).returncode == 0
    (folder / "data.mdb").write_bytes(whole)
    for page in tree_pages(folder):
        (folder / "data.mdb").write_bytes(whole)
        zero(folder, page)
        done = use(folder)
        assert done.returncode in (0, 1), f"page {page}: {done.returncode} {done.stderr[-500:]}"
        refused += "damaged" in done.stderr
    assert refused > 10


def test_a_damaged_list_of_free_pages_stops_the_broker_and_nobody_who_only_reads(tmp_path: Path) -> None:
    folder = small_store(tmp_path / "broker")
    zero(folder, tree_pages(folder)[0])
    with pytest.raises(UsageError, match=r"is damaged: .* no list of free pages; "):
        check_readable(folder)
    assert "no list of free pages" in verify_run(folder).problems[0]
    with open_snapshot(folder) as snapshot:
        assert len(list(snapshot.scan("payloads"))) == 40


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
        check_readable(folder)
