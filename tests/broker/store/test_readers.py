"""A command that reads the store beside its broker holds back freed pages as long as it reads, and no longer."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.store import LmdbStore, Write, lmdb_store

ROOT = Path(__file__).parents[3]
READER = """
import sys
from pathlib import Path
from broker.inspect.reader import open_snapshot
with open_snapshot(Path(sys.argv[1])):
    print("reading", flush=True)
    sys.stdin.readline()
"""
MIB = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LmdbStore]:
    store = LmdbStore(tmp_path / "broker", is_synced=False)
    rewrite(store)
    yield store
    store.close()


def rewrite(store: LmdbStore) -> None:
    """Replace everything once: 8 MiB."""
    for i in range(8):
        store.commit([Write("payloads", str(i), [os.urandom(MIB)])])


def start_reader(store: LmdbStore) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", READER, str(store.path.parent)]
    reader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert reader.stdout is not None
    assert reader.stdout.readline() == "reading\n"
    return reader


def test_a_reader_that_was_killed_holds_no_pages(store: LmdbStore) -> None:
    with start_reader(store) as reader:
        reader.kill()
    for _ in range(8):
        assert store.refusal(MIB) == ""
        rewrite(store)
    assert store.size_bytes() < 40 * MIB


def test_what_a_reader_holds_back_is_no_room(store: LmdbStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.commit([Write("payloads", str(i), None) for i in range(8)])
    assert store.refusal(MIB) == "", "there is room on the disk"
    monkeypatch.setattr(lmdb_store, "free_bytes", lambda _: lmdb_store.LEFT_FREE_BYTES - 6 * MIB)
    assert store.refusal(MIB) == "", "freed pages are room"
    with start_reader(store) as reader:
        text = store.refusal(MIB)
        assert f"process {reader.pid} reads the store" in text
        reader.communicate("\n")
    assert store.refusal(MIB) == ""
    assert "is full" in store.refusal(40 * MIB)
