"""LMDB in trouble: a map that cannot grow, a meta page that could not be written."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import lmdb
import pytest

from broker.store import LmdbStore, StoreError, Write

CANNOT_GROW = """
import resource, sys
from pathlib import Path
from broker.store import LmdbStore, StoreError, Write
store = LmdbStore(Path(sys.argv[1]), is_synced=False, map_bytes=256 << 20)
store.commit([Write("groups", "a", b"1")])
for i in range(125):
    store.commit([Write("payloads", str(i), b"x" * (2 << 20))])
used = int(open("/proc/self/statm").read().split()[0]) * 4096
soft, hard = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (used + (60 << 20), hard))
for _ in range(2):
    try:
        store.commit([Write("payloads", "b", b"x" * (8 << 20)), Write("groups", "a", b"2")])
        print("committed")
    except StoreError as bad:
        print("refused", bad.code, "cannot grow" in bad.text, store.get("groups", "a"))
    store.refusal(0), store.report()
resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
store.commit([Write("payloads", "b", b"x" * (8 << 20)), Write("groups", "a", b"2")])
print(len(store.get("payloads", "b")), store.get("groups", "a"))
"""


def test_a_map_that_cannot_grow_is_an_error_and_grows_when_it_can(tmp_path: Path) -> None:
    line = [sys.executable, "-c", CANNOT_GROW, str(tmp_path / "broker")]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=120, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == ["refused store True b'1'"] * 2 + ["8388608 b'2'"]


def test_an_environment_that_refuses_everything_is_opened_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LmdbStore(tmp_path / "broker", is_synced=False)
    write, calls = store._write, []

    def panics_once(writes: Sequence[Write]) -> None:
        calls.append(len(writes))
        if len(calls) == 1:
            raise lmdb.PanicError("mdb_txn_begin: MDB_PANIC")
        write(writes)

    monkeypatch.setattr(store, "_write", panics_once)
    store.commit([Write("groups", "a", b"1")])
    assert (calls, store.get("groups", "a")) == ([1, 1], b"1")
    store.close()


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (lmdb.Error("mdb_txn_commit: Input/output error"), r"cannot be written: .*Input/output error.*dmesg"),
        (lmdb.CorruptedError("mdb_put: page was wrong type"), r"is damaged: .*page was wrong type.*buffer export"),
    ],
)
def test_a_disk_that_fails_says_so_and_keeps_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: lmdb.Error, text: str
) -> None:
    store = LmdbStore(tmp_path / "broker", is_synced=False)
    store.commit([Write("groups", "a", b"1")])

    def fails(writes: Sequence[Write]) -> None:
        raise problem

    with monkeypatch.context() as broken:
        broken.setattr(store, "_write", fails)
        with pytest.raises(StoreError, match=text) as caught:
            store.commit([Write("groups", "a", b"2")])
    assert (caught.value.code, caught.value.retryable) == ("store", True)
    assert store.get("groups", "a") == b"1"
    store.close()
