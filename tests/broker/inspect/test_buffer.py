"""What is written can be listed, exported, imported byte for byte, and verified."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file
from slimebus_command import slimebus
from small_disk import fill as fill_disk
from small_disk import small_disk

from broker.inspect.export import export_groups, read_groups
from broker.inspect.reader import open_snapshot
from broker.inspect.show import _sample as show_lines
from broker.inspect.verify import verify
from broker.state.effects import Table
from broker.state.groups import Group, LateField, LeaseRecord, field_key
from broker.state.records import Meta, StepRecord
from broker.store import LmdbStore, Write
from slimebus.bus.errors import DataError, UsageError
from slimebus.bus.samples import Sample, decode_group, encode_group
from slimebus.cli.root import root
from slimebus.client import exported_groups

ROOT = Path(__file__).parents[3]


def samples(seed: int) -> list[Sample]:
    rng = np.random.default_rng(seed)
    made = []
    for length in (3, 5):
        logprobs = rng.normal(size=length).astype(np.float32)
        logprobs[0] = -np.inf
        extras = {"teacher": rng.normal(size=(length, 2)).astype(np.float16), "experts": rng.integers(0, 9, (length, 4)).astype(np.uint8)}
        made.append(
            Sample(
                tokens=rng.integers(0, 99, length).astype(np.int32),
                loss_mask=np.ones(length, np.uint8),
                rollout_logprobs=logprobs,
                versions=[(2, length)],
                reward=float(rng.normal()),
                metadata={"level": 3},
                extras=extras,
            )
        )
    return made


def fill(run_dir: Path) -> None:
    """Four ready groups, two of them in step 0, one queued and one dead."""
    store = LmdbStore(run_dir / "broker", is_synced=False)
    writes = [Write("meta", "meta", msgspec.msgpack.encode(Meta(run="r", next_step=0, cursor=6, ended={"dead": 1})))]
    names = [f"0/{i}" for i in range(6)]
    for i, name in enumerate(names):
        writes.append(Write("prompts", name, msgspec.msgpack.encode({"prompt": f"p{i}", "label": str(i), "metadata": {}})))
        group = Group(id=name, position=i, phase="queued")
        if i < 4:
            parts = encode_group(samples(i))
            lease = LeaseRecord(lineage="L")
            group = Group(id=name, position=i, phase="ready", num_samples=2, num_frames=len(parts), lease=lease)
            if i < 2:
                group.phase, group.step = "assigned", 0
            writes.append(Write("payloads", name, parts))
        if i == 5:
            group.phase, group.reason = "dead", "the tool is down"
        writes.append(Write("ended" if i == 5 else "groups", name, msgspec.msgpack.encode(group)))
    writes.append(Write("steps", "0", msgspec.msgpack.encode(StepRecord(step=0, version=0, groups=names[:2]))))
    store.commit(writes)
    store.close()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    fill(tmp_path / "run")
    return tmp_path / "run"


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return slimebus("buffer", *words)


@pytest.mark.parametrize("shard_bytes", [1, 1 << 20])
def test_groups_are_exported_and_imported_byte_for_byte(run_dir: Path, tmp_path: Path, shard_bytes: int) -> None:
    path = tmp_path / "out"
    with open_snapshot(run_dir) as snapshot:
        done = export_groups(snapshot, snapshot.groups(), path, shard_bytes=shard_bytes)
        originals = {g.id: snapshot.samples(g) for g in snapshot.groups()}
    assert (done.groups, done.samples, done.left_out) == (6, 8, {})
    assert len(list(path.glob("*.safetensors"))) == (4 if shard_bytes == 1 else 1)
    incoming = list(read_groups(path))
    assert [g.message.group for g in incoming] == [f"import/0/{i}" for i in range(6)]
    for group in incoming:
        original = originals[group.message.group.removeprefix("import/")]
        assert msgspec.msgpack.decode(group.frames[0])["prompt"].startswith("p")
        if original is None:
            assert len(group.frames) == 1
            continue
        assert group.message.lineage == "L"
        assert group.frames[1:] == [bytes(frame) for frame in original.frames]
        assert len(decode_group(group.frames[1:])) == 2


def test_late_fields_are_exported_with_the_samples(tmp_path: Path) -> None:
    store, parts, values = LmdbStore(tmp_path / "broker", is_synced=False), encode_group(samples(0)), np.arange(8, dtype=np.float32)
    field = LateField(name="values", by="critic", dtype="float32", shapes=[], digest=b"", size_bytes=values.nbytes)
    group = Group(id="0/0", position=0, phase="ready", num_samples=2, num_frames=len(parts), late=[field])
    writes = [Write("groups", "0/0", msgspec.msgpack.encode(group)), Write("payloads", "0/0", parts)]
    store.commit([*writes, Write("fields", field_key("0/0", "values"), [values.tobytes()])])
    store.close()
    with open_snapshot(tmp_path) as snapshot:
        export_groups(snapshot, snapshot.groups(), tmp_path / "x")
        (found,) = exported_groups.read_groups(tmp_path / "x")
        assert [sample.extras["values"].tolist() for sample in found.samples(tmp_path / "x")] == [[0, 1, 2], [3, 4, 5, 6, 7]]
    store = LmdbStore(tmp_path / "broker", is_synced=False)
    store.commit([Write("fields", field_key("0/0", "values"), None)])
    store.close()
    with open_snapshot(tmp_path) as snapshot:
        assert "is damaged" in export_groups(snapshot, snapshot.groups(), tmp_path / "y").left_out["0/0"]


def test_exported_arrays_are_read_by_the_safetensors_package(run_dir: Path, tmp_path: Path) -> None:
    with open_snapshot(run_dir) as snapshot:
        export_groups(snapshot, snapshot.groups(["ready"]), tmp_path / "x")
    arrays = load_file(tmp_path / "x" / "arrays-00000.safetensors")
    assert np.array_equal(arrays["0/2/1/tokens"], samples(2)[1].tokens)
    assert np.array_equal(arrays["0/3/0/teacher"], samples(3)[0].extras["teacher"])


def test_an_export_of_what_was_trained_says_what_is_freed_and_what_to_use_instead(run_dir: Path, tmp_path: Path) -> None:
    store = LmdbStore(run_dir / "broker", is_synced=False)
    store.commit([Write("meta", "meta", msgspec.msgpack.encode(Meta(run="r", next_step=7, oldest_kept_step=7)))])
    store.close()
    words = ["buffer", "export", "--run-dir", str(run_dir), "--state", "committed", "--out"]
    said = CliRunner().invoke(root, [*words, str(tmp_path / "x")]).stderr
    assert said.startswith("samples of the 7 steps before step 7 are freed")
    assert f"with trainer.dump_samples the trainer keeps the newest in {run_dir}/samples, which `slimebus trainer --replay` takes" in said
    (run_dir / "samples").mkdir()
    assert f"the newest are in {run_dir}/samples" in CliRunner().invoke(root, [*words, str(tmp_path / "y")]).stderr


def test_prompts_only(run_dir: Path, tmp_path: Path) -> None:
    with open_snapshot(run_dir) as snapshot:
        export_groups(snapshot, snapshot.groups(["ready"]), tmp_path / "x")
    for group in read_groups(tmp_path / "x", prompts_only=True):
        assert len(group.frames) == 1


def test_an_export_that_is_damaged_is_refused_by_name(run_dir: Path, tmp_path: Path) -> None:
    with open_snapshot(run_dir) as snapshot:
        export_groups(snapshot, snapshot.groups(["ready"]), tmp_path / "x")
    arrays = tmp_path / "x" / "arrays-00000.safetensors"
    arrays.write_bytes(arrays.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"arrays-00000.safetensors: the arrays of group '0/2' cannot be read"):
        list(read_groups(tmp_path / "x"))
    arrays.unlink()
    with pytest.raises(DataError, match=r"arrays-00000.safetensors: the arrays of group '0/2' cannot be read"):
        list(read_groups(tmp_path / "x"))


def test_an_export_that_fails_leaves_nothing(run_dir: Path, tmp_path: Path) -> None:
    def broken() -> Iterator[Group]:
        yield from snapshot.groups(["ready"])
        raise KeyboardInterrupt

    with open_snapshot(run_dir) as snapshot:
        with pytest.raises(KeyboardInterrupt):
            export_groups(snapshot, broken(), tmp_path / "x")
        assert list(tmp_path.glob("x*")) == []
        (tmp_path / "x").mkdir()
        with pytest.raises(UsageError, match="exists already"):
            export_groups(snapshot, snapshot.groups(), tmp_path / "x")
        with pytest.raises(UsageError, match="cannot write"):
            export_groups(snapshot, snapshot.groups(), run_dir / "broker" / "data.mdb" / "x")
        with small_disk(tmp_path / "full", 1) as disk:
            fill_disk(disk)
            with pytest.raises(UsageError, match=r"cannot write .*No space left on device.* on a disk with room"):
                export_groups(snapshot, snapshot.groups(["ready"]), disk / "x")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("[1]", "Expected `object`"),
        ('{"group": "a", "prompt": 1}', "has no prompt"),
        ('{"group": "a", "prompt": {"prompt": "p"}, "table": [0]}', "neither a prompt nor a group as"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, reason: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(f'{{"prompt": "good"}}\n{line}\n')
    with pytest.raises(DataError, match=rf"bad.jsonl:2: .*{reason}"):
        list(read_groups(file))


def test_a_step_of_which_a_part_is_freed_is_whole(run_dir: Path) -> None:
    store = LmdbStore(run_dir / "broker", is_synced=False)
    writes = [Write("meta", "meta", msgspec.msgpack.encode(Meta(run="r", next_step=1, oldest_kept_step=1, cursor=6, ended={"dead": 1})))]
    writes += [Write(table, "0/0", None) for table in ("groups", "payloads", "prompts")]
    (left,) = [msgspec.msgpack.decode(bytes(value), type=Group) for key, value in store.scan("groups") if key == "0/1"]
    left.phase = "committed"
    record = StepRecord(step=0, version=0, groups=["0/0", "0/1"], is_committed=True)
    writes += [Write("groups", "0/1", msgspec.msgpack.encode(left)), Write("steps", "0", msgspec.msgpack.encode(record))]
    store.commit(writes)
    store.close()
    assert command("verify", "--run-dir", str(run_dir)).stdout.startswith("ok: ")


@pytest.mark.parametrize("is_open", [True, False])
def test_a_backup_is_the_store_of_one_moment_and_a_run_directory(run_dir: Path, tmp_path: Path, is_open: bool) -> None:
    with contextlib.ExitStack() as stack:
        if is_open:
            stack.callback(LmdbStore(run_dir / "broker", is_synced=False).close)
        done = command("backup", "--run-dir", str(run_dir), "--out", str(tmp_path / "backup"))
    assert done.returncode == 0, done.stderr
    assert command("verify", "--run-dir", str(tmp_path / "backup")).stdout.startswith("ok: ")
    tables = [dict(open_all(folder)) for folder in (run_dir, tmp_path / "backup")]
    assert tables[0] == tables[1]
    again = command("backup", "--run-dir", str(run_dir), "--out", str(tmp_path / "backup"))
    assert (again.returncode, "exists" in again.stderr) == (2, True)


def open_all(run_dir: Path) -> Iterator[tuple[str, bytes]]:
    with open_snapshot(run_dir) as snapshot:
        for table in get_args(Table):
            yield from ((f"{table} {key}", bytes(snapshot.records.get(table, key) or b"")) for key in snapshot.records.keys(table))


def test_a_backup_without_room_says_so_and_leaves_nothing(run_dir: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", 1) as disk:
        fill_disk(disk, leave_bytes=8192)
        done = command("backup", "--run-dir", str(run_dir), "--out", str(disk / "backup"))
        assert done.returncode == 2
        assert "cannot be copied to" in done.stderr
        assert not (disk / "backup" / "broker").exists()


def test_a_whole_store_verifies(run_dir: Path) -> None:
    with open_snapshot(run_dir) as snapshot:
        report = verify(snapshot.records)
    assert report.problems == []
    assert report.counts == {"meta": 1, "groups": 5, "ended": 1, "prompts": 6, "payloads": 4, "steps": 1}
    assert report.states == {"assigned": 2, "ready": 2, "queued": 1, "dead": 1}


@pytest.mark.parametrize(
    ("write", "problem"),
    [
        (Write("payloads", "0/2", None), "payloads 0/2: it is missing"),
        (Write("prompts", "0/4", None), "prompts 0/4: it is missing"),
        (Write("prompts", "0/5", None), "prompts 0/5: it is missing"),
        (Write("payloads", "0/4", [b"x"]), "payloads 0/4: no group needs it"),
        (Write("payloads", "0/2", [b"x"]), "payloads 0/2: 1 frames, its row says 6"),
        (Write("groups", "0/2", b"\xc1"), "groups 0/2: cannot be used"),
        (Write("groups", "0/0", None), "step 0: its group 0/0 is missing"),
        (Write("steps", "0", None), "group 0/0: assigned, but in no step"),
        (Write("meta", "meta", None), "meta: the counters of the run are missing"),
        (Write("groups", "0/5", msgspec.msgpack.encode(Group(id="0/5", position=5))), "group 0/5: in play and ended"),
        (Write("groups", "0/9", msgspec.msgpack.encode(Group(id="0/8", position=5))), "groups 0/9: cannot be used: its"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_together_is_named(run_dir: Path, write: Write, problem: str) -> None:
    store = LmdbStore(run_dir / "broker", is_synced=False)
    store.commit([write])
    store.close()
    with open_snapshot(run_dir) as snapshot:
        assert any(problem in found for found in verify(snapshot.records).problems)


def test_a_damaged_record_is_named_left_out_of_an_export_and_hides_no_other(run_dir: Path, tmp_path: Path) -> None:
    data = run_dir / "broker" / "data.mdb"
    with data.open("r+b") as file:
        file.seek(file.read(1 << 20).index(samples(2)[1].extras["teacher"].tobytes()))
        file.write(b"\xff\xff")
    done = command("verify", "--run-dir", str(run_dir))
    assert done.returncode == 1
    assert "record '0/2' of table 'payloads' is damaged" in done.stdout
    out = tmp_path / "rest"
    done = command("export", "--run-dir", str(run_dir), "--out", str(out))
    assert done.returncode == 1
    assert "left out group 0/2" in done.stderr
    assert {json.loads(line)["group"] for line in (out / "groups.jsonl").read_text().splitlines()} == {"0/0", "0/1", "0/3", "0/4", "0/5"}


BESIDE = """
import sys, time
from pathlib import Path
from broker.inspect.show import _sample as show_lines
from broker.store.lmdb_store import begin_read, open_environment
env = open_environment(Path(sys.argv[1]), is_readonly=True)
table = env.open_db(b"payloads", create=False)
print("open", flush=True)
sys.stdin.readline()
with begin_read(env) as txn:
    print(txn.stat(table)["entries"], len(txn.get(b"19", db=table)))
"""


def test_another_process_that_has_it_open_sees_it_grow(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path / "broker", is_synced=False, map_bytes=1 << 20)
    store.commit([Write("payloads", "0", b"x")])
    line = [sys.executable, "-c", BESIDE, str(tmp_path / "broker")]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "open\n"
        for i in range(1, 20):
            store.commit([Write("payloads", str(i), b"x" * 1_000_000)])
        out, _ = reader.communicate("\n", timeout=30)
    assert out.split() == ["20", "1000008"]
    store.close()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ls", "--run-dir", "RUN"], "0/2"),
        (["ls", "--run-dir", "RUN", "--state", "dead"], "the tool is down"),
        (["ls", "--run-dir", "RUN", "--reason", "tool", "--json"], '"group": "0/5"'),
        (["show", "--run-dir", "RUN", "0/2"], "trained  ids "),
        (["show", "--run-dir", "RUN", "0/5"], "no samples"),
        (["show", "--run-dir", "RUN", "0/2", "--json"], '"-inf"'),
    ],
)
def test_a_person_sees(run_dir: Path, words: list[str], expected: str) -> None:
    done = command(*(str(run_dir) if word == "RUN" else word for word in words))
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ls", "--run-dir", "NOWHERE"], "it does not exist"),
        (["show", "--run-dir", "RUN", "0/22"], "did you mean 0/2"),
        (["show", "--run-dir", "RUN"], "no GROUP given"),
        (["export", "--run-dir", "RUN", "--out", "RUN"], "exists already"),
        (["drop", "--run-dir", "RUN"], "no GROUP given"),
        (["drop", "--run-dir", "RUN", "0/2"], "give the RUN.yaml"),
        (["replay", "--run-dir", "RUN", "0/55"], "did you mean 0/5"),
        (["import", "--run-dir", "RUN"], "no PATH given"),
        (["verify", "word"], "is not a RUN.yaml"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(run_dir: Path, words: list[str], expected: str) -> None:
    places: dict[str, Any] = {"RUN": str(run_dir), "NOWHERE": str(run_dir / "nowhere")}
    done = command(*(places.get(word, word) for word in words))
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert expected in done.stderr


def test_all_tokens_of_a_sample_are_shown_and_the_masked_ones_marked() -> None:
    mask = np.array([0, 0, 1, 0, 1], np.uint8)
    sample = Sample(tokens=np.array([5, 6, 7, 8, 9], np.int32), loss_mask=mask, rollout_logprobs=np.zeros(5, np.float32), versions=[(3, 5)])
    _, *runs = show_lines(0, sample, None)
    assert runs == ["  masked   ids 5 6", "  trained  ids 7", "  masked   ids 8", "  trained  ids 9"]
