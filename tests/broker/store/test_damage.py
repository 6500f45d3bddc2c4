"""Damage on the disk is found and named; it is never used and never ends the process."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from broker.store import Damaged, LmdbStore, Write
from broker.store.pages import check_pages
from slimebus.errors import UsageError

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
    check_pages(folder)
    assert len(read_all(folder)) == 500


@pytest.mark.parametrize("place", [0, 10, 17, 41, 58, 72, 106])
def test_a_damaged_meta_page_is_refused_with_the_way_out(folder: Path, place: int) -> None:
    for page in (0, 1):  # LMDB uses the newer one
        flip(folder, page * PAGE + place)
    with pytest.raises(UsageError, match=r"damaged: .*restore a backup.*buffer verify.*buffer export") as caught:
        read_all(folder)
    assert caught.value.code == "store_damaged"


@pytest.mark.parametrize("place", [144, 146, 150])
def test_meta_pages_that_do_not_follow_each_other_are_refused(folder: Path, place: int) -> None:
    flip(folder, place)  # LMDB would take the older one and forget the last transaction
    with pytest.raises(UsageError, match=r"damaged: .*transaction"):
        read_all(folder)


def test_a_file_that_was_cut_short_is_refused_with_the_way_out(folder: Path) -> None:
    file = folder / "data.mdb"
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)
    with pytest.raises(UsageError, match=r"damaged: .*cut short.*restore a backup"):
        read_all(folder)
    file.write_bytes(b"not a store" * 2000)
    with pytest.raises(UsageError, match="damaged"):
        read_all(folder)


FLIPS = """
import random, shutil, sys
from pathlib import Path
from broker.store import Damaged, LmdbStore
from slimebus.errors import UsageError
folder, seed = Path(sys.argv[1]), int(sys.argv[2])
whole = (folder / "data.mdb").read_bytes()
def read():
    store = LmdbStore(folder, is_synced=False)
    try:
        return {(t, k): v for t in ("groups", "payloads") for k, v in store.scan(t)}
    finally:
        store.close()
before, chance, found = read(), random.Random(seed), 0
for i in range(200):
    torn = bytearray(whole)
    page = chance.randrange(len(torn) // 4096)
    for _ in range(chance.choice([1, 1, 8])):
        place = page * 4096 + (chance.randrange(120) if chance.random() < 0.7 else chance.randrange(4096))
        torn[place] ^= 1 << chance.randrange(8)
    (folder / "data.mdb").write_bytes(torn)
    try:
        after = read()
    except (UsageError, Damaged):
        found += 1
        continue
    assert after == before, f"seed {seed}, flip {i}: wrong records were read"
print("found", found)
"""


def test_flipped_bits_anywhere_are_found_or_harmless_and_never_end_the_process(folder: Path) -> None:
    command = [sys.executable, "-c", FLIPS, str(folder), "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[1]) > 50


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


def test_a_store_that_grew_and_shrank_at_random_is_always_found_whole(tmp_path: Path) -> None:
    chance = random.Random(3)
    store = LmdbStore(tmp_path / "broker", is_synced=False, map_bytes=1 << 20)
    for i in range(150):
        keys = [str(chance.randrange(80)) for _ in range(chance.randint(1, 12))]
        values = [None if chance.random() < 0.4 else b"x" * chance.choice([1, 50, 1900, 4000, 30_000, 200_000]) for _ in keys]
        writes = dict(zip(keys, values, strict=True))
        store.commit([Write(chance.choice(["groups", "payloads", "steps"]), key, value) for key, value in writes.items()])
        if i % 10 == 0:
            check_pages(tmp_path / "broker")
    store.close()
    check_pages(tmp_path / "broker")


def test_a_path_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "broker").write_text("a file")
    with pytest.raises(UsageError, match=r"needs a folder, but .*broker is a file"):
        LmdbStore(tmp_path / "broker", is_synced=False)
