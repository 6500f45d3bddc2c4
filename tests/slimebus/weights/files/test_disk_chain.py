"""Versions through a shared directory."""

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slimebus.bus.errors import WeightsError
from slimebus.weights.files import delta_file
from slimebus.weights.files.disk_chain import DiskChain, DiskPuller, chain_dir, part_files, read_latest
from slimebus.weights.store.version_store import VersionStore

KEEP = 3


class Trainer:
    """A store and the chain it is written to; `models` is what each version must be."""

    def __init__(self, root: Path, model: Any, after: Any, lineage: str = "L") -> None:
        self.store, self.chain = VersionStore(keep=KEEP, lineage=lineage), DiskChain(root, lineage, keep=KEEP, patience_s=0)
        self.next, self.after, self.models = model, after, []

    def successor(self, model: Any = None) -> "Trainer":
        """Another trainer of the run."""
        return Trainer(self.chain.folder.parent, self.models[0] if model is None else model, self.after, "M")

    def publish(self, count: int = 1) -> None:
        for _ in range(count):
            self.store.publish(self.next)
            self.write()
            self.models.append(self.next)
            self.next = self.after(self.next, len(self.models))

    def write(self) -> None:
        self.chain.write(self.store)
        self.chain.announce(self.store.newest.version, self.store.newest.digest)
        self.chain.collect(self.store.newest.version)

    def files(self, suffix: str) -> list[int]:
        return sorted(version for path, version in part_files(self.chain.folder).items() if path.suffix == suffix)


@pytest.fixture
def trainer(tmp_path: Path, model: Any, after: Any) -> Trainer:
    return Trainer(tmp_path, model, after)


def fail(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, failures: list[OSError]) -> list[OSError]:
    """Calls of this function raise these, the last one first, for as long as there are any."""
    original = getattr(place, name)

    def call(*given: Any) -> Any:
        if failures:
            raise failures.pop()
        return original(*given)

    monkeypatch.setattr(place, name, call)
    return failures


def test_readers_near_and_far_behind_get_the_newest_version(trainer: Trainer, check: Any) -> None:
    puller, have, behind = DiskPuller(trainer.chain.folder), None, None
    for number in range(9):
        trainer.publish()
        have = puller.pull(have, 1.0)
        check(have, trainer.models[number])
        if number % 4 == 0:
            behind = puller.pull(behind, 1.0)
            check(behind, trainer.models[number])
        check(DiskPuller(trainer.chain.folder).pull(None, 1.0), trainer.models[number])
    assert puller.pull(have, 1.0) is have


def test_what_a_reader_has_stays_as_it_is_while_it_reads_several_versions(trainer: Trainer, check: Any) -> None:
    """One tensor changes in each, after it was the same for two; buffers that are used again are never those of the version at hand."""
    trainer.after = lambda before, number: before if number < 3 else {**before, "fixed": before["fixed"] + np.uint16(1)}
    puller = DiskPuller(trainer.chain.folder)
    trainer.publish()
    first = puller.pull(None, 1.0)
    trainer.publish()
    have = puller.pull(first, 1.0)
    trainer.publish(3)
    newer = puller.pull(have, 1.0)
    check(newer, trainer.models[-1])
    check(have, trainer.models[1])
    other = trainer.successor(trainer.models[1])
    other.models = [trainer.models[1]] * 2
    other.publish(3)
    check(DiskPuller(other.chain.folder).pull(have, 1.0), other.models[-1])
    check(have, trainer.models[1])


def test_what_no_reader_needs_is_deleted(trainer: Trainer) -> None:
    trainer.publish(12)
    assert len(trainer.files(".full")) == 1
    assert len(trainer.files(".delta")) <= 2 * KEEP
    oldest = trainer.files(".delta")[0]
    assert oldest <= trainer.files(".full")[0] + 1


def test_publishing_again_after_a_failure_changes_nothing(trainer: Trainer, check: Any) -> None:
    trainer.publish(2)
    before = {path: path.stat().st_mtime_ns for path in trainer.chain.folder.iterdir()}
    trainer.write()
    assert {path: path.stat().st_mtime_ns for path in trainer.chain.folder.iterdir()} == before
    (trainer.chain.folder / "latest.json").unlink()
    trainer.write()
    check(DiskPuller(trainer.chain.folder).pull(None, 1.0), trainer.models[1])


def test_a_damaged_delta_is_gone_around_by_a_full_copy_and_a_damaged_chain_is_an_error(trainer: Trainer, check: Any) -> None:
    trainer.publish(2)
    puller = DiskPuller(trainer.chain.folder)
    have = puller.pull(None, 1.0)
    trainer.publish(2)
    (full,) = trainer.files(".full")
    damaged = trainer.chain.folder / f"{full:06d}-0.delta"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    check(puller.pull(have, 1.0), trainer.models[3])
    assert puller.counts["wrong_bytes"] == 1
    whole = trainer.chain.folder / f"{full:06d}-0.full"
    whole.write_bytes(whole.read_bytes()[:-1] + b"!")
    with pytest.raises(WeightsError, match="no verified version within 0 s"):
        DiskPuller(trainer.chain.folder).pull(None, 0.1)


def test_a_new_lineage_has_a_folder_of_its_own_and_takes_the_old_ones_place(trainer: Trainer, check: Any) -> None:
    trainer.publish(3)
    have = DiskPuller(trainer.chain.folder).pull(None, 1.0)
    restarted = trainer.successor(trainer.models[1])
    restarted.publish()
    new = DiskPuller(restarted.chain.folder).pull(have, 1.0)
    check(new, trainer.models[1])
    assert new.lineage == "M"
    assert not trainer.chain.folder.exists()


def test_files_of_another_lineage_are_refused(trainer: Trainer, tmp_path: Path) -> None:
    trainer.publish()
    trainer.chain.folder.rename(tmp_path / "M")
    with pytest.raises(WeightsError, match="version 0 of lineage L; expected was 0 of M"):
        DiskPuller(tmp_path / "M").pull(None, 0.1)


@pytest.mark.parametrize("name", ["", "..", "a/b", "x" * 200, "a b"])
def test_a_lineage_that_is_no_folder_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(WeightsError, match="cannot name a folder"):
        chain_dir(tmp_path, name)


def test_a_reader_waits_for_the_first_version_and_can_be_told_to_stop(trainer: Trainer) -> None:
    puller = DiskPuller(trainer.chain.folder)
    threading.Timer(0.1, puller.cancel).start()
    with pytest.raises(WeightsError, match="cancelled"):
        puller.pull(None, 30.0)


def test_readers_beside_a_writer_only_ever_see_whole_versions(trainer: Trainer) -> None:
    trainer.publish()
    digests, stop = set(), threading.Event()

    def read() -> None:
        puller, have = DiskPuller(trainer.chain.folder), None
        while not stop.is_set():
            have = puller.pull(have, 5.0)
            digests.add(have.digest)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    made = {trainer.store.newest.digest}
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        trainer.publish()
        made.add(trainer.store.newest.digest)
    stop.set()
    for thread in threads:
        thread.join(10)
    assert len(digests) > 2
    assert digests <= made


def test_a_torn_latest_is_an_error(trainer: Trainer) -> None:
    trainer.publish()
    latest = trainer.chain.folder / "latest.json"
    latest.write_bytes(latest.read_bytes().replace(b'"version":0', b'"version":7'))
    with pytest.raises(WeightsError, match="its check does not fit"):
        read_latest(trainer.chain.folder)


def test_what_is_announced_before_it_can_be_seen_is_waited_for(trainer: Trainer, check: Any) -> None:
    """As over NFS: the new latest.json is there, the file it names is not yet, or has not all of its bytes yet."""
    trainer.publish(2)
    have = DiskPuller(trainer.chain.folder).pull(None, 1.0)
    trainer.publish()
    file = trainer.chain.folder / "000002-0.delta"
    data, hidden = file.read_bytes(), file.with_suffix(".hidden")
    file.rename(hidden)
    (trainer.chain.folder / "000000-0.full").rename(trainer.chain.folder / "full.hidden")
    with pytest.raises(WeightsError, match="no verified version within 0 s"):
        DiskPuller(trainer.chain.folder).pull(have, 0.2)
    file.write_bytes(data[: len(data) // 2])
    threading.Timer(0.3, hidden.replace, (file,)).start()
    check(DiskPuller(trainer.chain.folder).pull(have, 10.0), trainer.models[2])


def test_a_listing_that_has_become_older_leads_nobody_back(trainer: Trainer, check: Any) -> None:
    trainer.publish()
    latest = trainer.chain.folder / "latest.json"
    stale = latest.read_bytes()
    trainer.publish()
    have, fresh = DiskPuller(trainer.chain.folder).pull(None, 1.0), latest.read_bytes()
    latest.write_bytes(stale)
    with pytest.raises(WeightsError, match="says version 0, and 1 was read before"):
        DiskPuller(trainer.chain.folder).pull(have, 0.1)
    threading.Timer(0.2, latest.write_bytes, (fresh,)).start()
    assert DiskPuller(trainer.chain.folder).pull(have, 10.0) is have


def test_a_mount_that_fails_for_a_while_is_an_error_of_the_pull_or_none_at_all(
    trainer: Trainer, check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.publish()
    failures = fail(monkeypatch, delta_file, "read", [OSError(116, "Stale file handle"), PermissionError(13, "Permission denied")])
    check(DiskPuller(trainer.chain.folder).pull(None, 10.0), trainer.models[0])
    failures += [OSError(5, "Input/output error")] * 50
    with pytest.raises(WeightsError, match="Input/output error"):
        DiskPuller(trainer.chain.folder).pull(None, 0.1)


def test_files_that_a_killed_writer_left_are_read_by_nobody_and_deleted_by_its_successor(
    trainer: Trainer, tmp_path: Path, check: Any
) -> None:
    trainer.publish(2)
    folder = trainer.chain.folder
    (folder / ".000002-0.delta.4711.unfinished").write_bytes(b"SLMBDF01 half")
    (folder / ".latest.json.4711.unfinished").write_bytes(b"{")
    never = tmp_path / "NeverPublished"
    never.mkdir()
    (never / ".000000-0.full.4711.unfinished").write_bytes(b"SLMBDF01 half")
    kept = tmp_path / "notes"
    kept.mkdir()
    (kept / "mine.full").write_text("not of a chain")
    check(DiskPuller(folder).pull(None, 1.0), trainer.models[1])
    trainer.successor().publish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["M", "notes"]


class Killed(BaseException):
    """As by kill -9: from then on nothing is written or deleted."""


def deadly(original: Any, steps_left: list[int]) -> Any:
    """Kills before or after the call with which the steps are used up."""

    def call(*args: Any, **options: Any) -> None:
        for work in (lambda: original(*args, **options), lambda: None):
            steps_left[0] -= 1
            if steps_left[0] <= 0:
                raise Killed
            work()

    return call


def test_a_trainer_killed_at_any_step_of_a_publish_leaves_a_whole_version(
    tmp_path: Path, model: Any, after: Any, check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version that it publishes has a delta and a full copy, and makes older files useless."""
    for step in range(1, 100):
        trainer = Trainer(tmp_path / f"{step}", model, after)
        trainer.publish(KEEP)
        have, steps_left = DiskPuller(trainer.chain.folder).pull(None, 1.0), [step]
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            for place, name in ((os, "replace"), (os, "fsync"), (Path, "unlink")):
                patch.setattr(place, name, deadly(getattr(place, name), steps_left))
            trainer.publish()
        models = [*trainer.models, trainer.next]
        for base in (None, have):
            got = DiskPuller(trainer.chain.folder).pull(base, 0.1)
            assert got.version in (KEEP - 1, KEEP)
            check(got, models[got.version])
        trainer.successor().publish()
        assert [path.name for path in (tmp_path / f"{step}").iterdir()] == ["M"]
        if steps_left[0] > 0:
            break
    assert step > 12


def test_a_trainer_that_was_replaced_cannot_delete_its_successors_versions(trainer: Trainer) -> None:
    trainer.publish()
    successor = trainer.successor()
    successor.publish()
    with pytest.raises(WeightsError, match=r"was not written.*another trainer of this run"):
        trainer.publish()
    trainer.chain.folder.mkdir()
    trainer.publish()
    assert read_latest(successor.chain.folder) is not None


def test_a_version_that_went_back_is_refused_as_another_trainers(trainer: Trainer, tmp_path: Path, model: Any, after: Any) -> None:
    trainer.publish(3)
    with pytest.raises(WeightsError, match="two trainers write there"):
        Trainer(tmp_path, model, after).publish()


def test_a_full_disk_leaves_the_version_before_and_the_retry_succeeds(
    trainer: Trainer, check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.publish()
    failing = fail(monkeypatch, os, "replace", [OSError(28, "No space left on device")] * 9)
    with pytest.raises(WeightsError, match="No space left"):
        trainer.publish()
    assert not list(trainer.chain.folder.glob(".*")), "what was cut short is not left behind"
    check(DiskPuller(trainer.chain.folder).pull(None, 1.0), trainer.models[0])
    failing.clear()
    trainer.write()
    assert DiskPuller(trainer.chain.folder).pull(None, 1.0).digest == trainer.store.newest.digest


def test_a_directory_that_cannot_be_reached_for_a_while_is_written_to_later(
    trainer: Trainer, tmp_path: Path, check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.chain = DiskChain(tmp_path, "L")
    failures = fail(monkeypatch, os, "replace", [OSError(5, "Input/output error"), OSError(28, "No space left on device")])
    trainer.publish()
    failures += [OSError(5, "Input/output error")]
    trainer.publish()
    check(DiskPuller(trainer.chain.folder).pull(None, 1.0), trainer.models[1])
    failures += [OSError(30, "Read-only file system")] * 100
    trainer.chain.close()
    with pytest.raises(WeightsError, match="Read-only file system"):
        trainer.publish()


def test_a_slow_reader_reads_to_its_end_what_is_deleted_meanwhile(trainer: Trainer, check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer.publish(KEEP)
    apply, late = delta_file.apply, [2 * KEEP]

    def slow(*args: Any, **options: Any) -> Any:
        if late:
            trainer.publish(late.pop())
        return apply(*args, **options)

    monkeypatch.setattr(delta_file, "apply", slow)
    puller = DiskPuller(trainer.chain.folder)
    check(puller.pull(None, 5.0), trainer.models[KEEP - 1])
    assert puller.counts["full_tensors"] == 1


def test_two_slow_readers_reach_a_newer_version_although_files_go_meanwhile(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between any two files that they read, the trainer publishes more than it keeps; for a while."""
    trainer.publish()
    read, rounds, lock = delta_file.read, [4], threading.Lock()

    def slow(path: Path) -> Any:
        with lock:
            if rounds[0]:
                rounds[0] -= 1
                trainer.publish(KEEP + 1)
        return read(path)

    monkeypatch.setattr(delta_file, "read", slow)
    got: list[str] = []
    threads = [threading.Thread(target=lambda: got.append(DiskPuller(trainer.chain.folder).pull(None, 20.0).digest)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(got) == 2
    assert set(got) <= {VersionStore().publish(published).digest for published in trainer.models[1:]}


def test_parts_of_two_publishers_are_one_version_once_the_last_is_written(tmp_path: Path, model: Any, after: Any, check: Any) -> None:
    """The second is a version ahead, as a stage of a pipeline may be."""
    stores = [VersionStore(keep=KEEP, lineage="L") for _ in range(2)]
    chains = [DiskChain(tmp_path, "L", keep=KEEP, part=part, parts=2) for part in range(2)]
    models = [model]
    for number in range(1, 9):
        models.append(after(models[-1], number))

    def write(part: int, version: int) -> None:
        names = sorted(model)[part::2]
        stores[part].publish({name: models[version][name] for name in names})
        chains[part].write(stores[part])

    puller, have = DiskPuller(chains[0].folder), None
    write(1, 0)
    for version in range(8):
        write(1, version + 1)
        write(0, version)
        if have is not None:
            assert puller.pull(have, 1.0) is have, "not announced"
        chains[0].announce(version, VersionStore().publish(models[version]).digest)
        chains[0].collect(version)
        have = puller.pull(have, 1.0)
        check(have, models[version])
        check(DiskPuller(chains[0].folder).pull(None, 1.0), models[version])
    kept = {path.name for path in part_files(chains[0].folder)}
    assert {name.replace("-0.", "-1.") for name in kept if "-0." in name} == {name for name in kept if "-1." in name} - {"000008-1.delta"}
    (chains[0].folder / "000006-1.full").unlink()
    with pytest.raises(WeightsError, match=r"No such file.*000006-1\.full"):
        DiskPuller(chains[0].folder).pull(None, 0.1)
