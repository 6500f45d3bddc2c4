"""A worker's tensors in shared memory, what its neighbours take of them, and what becomes of it when it dies."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slimebus.bus.errors import WeightsError
from slimebus.weights.host import shared_folder
from slimebus.weights.host.safetensors_file import as_weights, read_model
from slimebus.weights.host.shared_folder import SharedFolder, remove_stale_files
from slimebus.weights.host.tensor_file import file_name
from slimebus.weights.tensors import Weights, as_tensor, hash_bytes


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"not to be copied")
    return folder


@pytest.fixture
def folder(tmp_path: Path, closing: Any) -> SharedFolder:
    return closing(SharedFolder(tmp_path))


@pytest.fixture
def neighbour(tmp_path: Path, closing: Any) -> SharedFolder:
    return closing(SharedFolder(tmp_path))


def weights(version: int = 0, **values: list[int]) -> Weights:
    tensors = {name: as_tensor(name, np.array(content, np.uint16)) for name, content in values.items()}
    return as_weights(tensors, lineage="one", version=version)


def names(path: Path) -> set[str]:
    return {file.name for file in path.iterdir()}


def test_a_version_is_a_model_directory(folder: SharedFolder, model: Path) -> None:
    held = folder.place_in_memory(weights(a=[1, 2], b=[3]))
    made = folder.make_version(held, model)
    read = read_model(made.directory)
    assert {name: tensor.steps.tolist() for name, tensor in read.items()} == {"a": [1, 2], "b": [3]}
    assert names(made.directory) == {"config.json", "model.safetensors.index.json"} | {t.file.name for t in made.tensors.values()}
    metadata = json.loads((made.directory / "model.safetensors.index.json").read_text())["metadata"]
    assert (metadata["lineage"], metadata["version"], metadata["hashes"]) == ("one", 0, held.hashes)


def test_a_shared_tensor_names_its_bytes(folder: SharedFolder, model: Path) -> None:
    made = folder.make_version(folder.place_in_memory(weights(a=[1, 2])), model)
    tensor = made.tensors["a"]
    assert tensor.offset % 64 == 0
    assert hash_bytes(tensor.file.read_bytes()[tensor.offset :]) == tensor.hash


def test_an_unchanged_tensor_is_one_file_in_both_versions(folder: SharedFolder, model: Path) -> None:
    first = folder.make_version(folder.place_in_memory(weights(0, a=[1], b=[2])), model)
    second = folder.make_version(folder.place_in_memory(weights(1, a=[1], b=[3])), model)
    assert first.tensors["a"].file.samefile(second.tensors["a"].file)
    assert not first.tensors["b"].file.samefile(second.tensors["b"].file)


def test_equal_bytes_of_two_tensors_are_two_files(folder: SharedFolder, model: Path) -> None:
    made = folder.make_version(folder.place_in_memory(weights(a=[7], b=[7])), model)
    assert set(read_model(made.directory)) == {"a", "b"}


def test_what_no_version_needs_is_given_back_and_mappings_of_it_stay(folder: SharedFolder, model: Path) -> None:
    old = folder.place_in_memory(weights(0, a=[1], b=[2]))
    folder.make_version(old, model)
    new = folder.make_version(folder.place_in_memory(weights(1, a=[1], b=[3])), model)
    folder.retain(new)
    assert names(folder.path / "tensors") == {tensor.file.name for tensor in new.tensors.values()}
    assert names(folder.path / "versions") == {new.directory.name}
    assert old.tensors["b"].steps.tolist() == [2]


LARGE = shared_folder.MIN_REUSED_BYTES


def large(version: int) -> Weights:
    return weights(version, a=[version] * LARGE)


def serve(folder: SharedFolder, version: Weights, model: Path) -> tuple[Path, int]:
    """Make it the only version of the folder; the file of its tensor and that file's inode."""
    made = folder.make_version(folder.place_in_memory(version), model)
    folder.retain(made)
    return made.tensors["a"].file, made.tensors["a"].file.stat().st_ino


def test_a_version_is_written_into_the_memory_of_the_one_before_the_last(folder: SharedFolder, model: Path) -> None:
    inodes = [serve(folder, large(version), model)[1] for version in range(6)]
    assert inodes == [*inodes[:2]] * 3
    newest = read_model(next((folder.path / "versions").iterdir()))["a"]
    assert newest.steps.tolist() == [5] * LARGE


@pytest.mark.parametrize("reading", ["mapped", "open", "linked"])
def test_who_reads_a_version_reads_it_for_as_long_as_they_like(folder: SharedFolder, model: Path, tmp_path: Path, reading: str) -> None:
    file, first = serve(folder, large(1), model)
    with contextlib.ExitStack() as stack:
        if reading == "mapped":
            array = read_model(file)["a"].steps
            content = array.tolist
        elif reading == "open":
            descriptor = stack.enter_context(file.open("rb"))
            content = lambda: np.frombuffer(descriptor.read()[-2 * LARGE :], np.uint16).tolist()  # noqa: E731
        else:
            os.link(file, tmp_path / "link.safetensors")
            content = lambda: read_model(tmp_path / "link.safetensors")["a"].steps.tolist()  # noqa: E731
        inodes = [serve(folder, large(version), model)[1] for version in range(2, 6)]
        assert first not in inodes
        assert content() == [1] * LARGE


def test_memory_that_neighbours_shared_is_used_again_by_whoever_pulls(folder: SharedFolder, neighbour: SharedFolder, model: Path) -> None:
    _, first = serve(folder, large(1), model)
    assert all(is_neighbours for _, _, is_neighbours in neighbour.find(large(1).forms))
    serve(folder, large(2), model)
    serve(neighbour, large(1), model)
    list(neighbour.find(large(2).forms))
    serve(neighbour, large(2), model)
    assert serve(folder, large(3), model)[1] == first


def test_spare_memory_goes_when_there_is_no_other(folder: SharedFolder, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in range(2):
        serve(folder, large(version), model)
    assert names(folder.path / "reusable")
    fallocate, calls = os.posix_fallocate, []

    def full_at_first(descriptor: int, offset: int, length: int) -> None:
        calls.append(length)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        fallocate(descriptor, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", full_at_first)
    folder.allocate(weights(b=[1] * LARGE).forms[0])
    assert not names(folder.path / "reusable")


def test_no_memory_is_kept_for_tensors_that_are_gone(folder: SharedFolder, model: Path) -> None:
    serve(folder, large(0), model)
    serve(folder, large(1), model)
    folder.retain(folder.make_version(folder.place_in_memory(weights(2, b=[1])), model))
    assert not names(folder.path / "reusable")


def test_nothing_writes_to_a_kept_tensor(folder: SharedFolder) -> None:
    held = folder.place_in_memory(weights(a=[1]))
    with pytest.raises(ValueError, match="read-only"):
        held.tensors["a"].buffer[0] = 9


def test_what_is_not_kept_leaves_no_file(folder: SharedFolder) -> None:
    folder.allocate(weights(a=[1]).forms[0])
    folder.discard_unfinished()
    assert not names(folder.path / "unfinished")
    assert not names(folder.path / "tensors")


def test_an_unfinished_tensor_is_not_found(folder: SharedFolder, neighbour: SharedFolder) -> None:
    wanted = weights(a=[1]).forms
    folder.allocate(wanted[0])
    assert not list(neighbour.find(wanted))


def test_a_neighbours_tensor_is_linked_not_copied_and_outlives_it(folder: SharedFolder, neighbour: SharedFolder, model: Path) -> None:
    had = folder.make_version(folder.place_in_memory(weights(a=[1, 2])), model)
    [(form, buffer, is_from_neighbour)] = neighbour.find(weights(a=[1, 2]).forms)
    assert (form.name, buffer.view(np.uint16).tolist(), is_from_neighbour) == ("a", [1, 2], True)
    assert had.tensors["a"].file.samefile(neighbour.path / "tensors" / file_name(form))
    folder.close()
    [(_, again, is_from_neighbour)] = neighbour.find(weights(a=[1, 2]).forms)
    assert (again.view(np.uint16).tolist(), is_from_neighbour) == ([1, 2], False)


def flip(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize(
    "damage",
    [
        flip,
        lambda content: content[:-1],
        lambda content: content + b"\0",
        lambda content: b"",
        lambda content: content.replace(b'"a"', b'"z"'),
        lambda content: b"\xff" * 8 + content[8:],
    ],
)
def test_a_neighbours_damaged_file_is_not_taken(folder: SharedFolder, neighbour: SharedFolder, damage) -> None:
    folder.place_in_memory(weights(a=[1, 2]))
    [file] = (folder.path / "tensors").iterdir()
    content = file.read_bytes()
    file.chmod(0o600)
    file.write_bytes(damage(content))
    assert not list(neighbour.find(weights(a=[1, 2]).forms))
    assert not names(neighbour.path / "tensors")
    assert not names(neighbour.path / "unfinished")


def test_a_link_or_a_pipe_in_a_neighbours_folder_is_not_taken(folder: SharedFolder, neighbour: SharedFolder, tmp_path: Path) -> None:
    folder.place_in_memory(weights(a=[1, 2]))
    [form] = weights(a=[1, 2]).forms
    file = folder.path / "tensors" / file_name(form)
    os.symlink(file.rename(tmp_path / "somewhere"), file)
    assert not list(neighbour.find([form]))
    file.unlink()
    os.mkfifo(file)
    assert not list(neighbour.find([form]))


def test_the_folder_of_a_killed_worker_is_freed_by_the_next_and_a_living_ones_is_not(folder: SharedFolder, tmp_path: Path) -> None:
    code = f"from slimebus.weights.host.shared_folder import SharedFolder as F\nfrom pathlib import Path\nf = F(Path({str(tmp_path)!r}))\n"
    code += "print(f.path, flush=True)\nimport time\ntime.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    left = Path(other.stdout.readline().strip())
    remove_stale_files(tmp_path)
    assert left.is_dir(), "it lives, whatever its process id is"
    other.kill()
    other.wait()
    other.stdout.close()
    remove_stale_files(tmp_path)
    assert not left.exists()
    assert folder.path.is_dir()


def test_a_folder_without_a_lock_is_left_until_its_worker_must_have_begun(tmp_path: Path) -> None:
    beginning, left = tmp_path / "slimebus-weights-1-new", tmp_path / "slimebus-weights-1-old"
    for path in (beginning, left):
        path.mkdir()
    os.utime(left, (0, time.time() - 2 * shared_folder.BEGINNING_S))
    remove_stale_files(tmp_path)
    assert (beginning.exists(), left.exists()) == (True, False)


def test_no_descriptor_stays_open_for_a_tensor(folder: SharedFolder) -> None:
    before = len(os.listdir("/proc/self/fd"))
    held = folder.place_in_memory(weights(**{f"t{i}": [i] for i in range(50)}))
    assert len(os.listdir("/proc/self/fd")) == before
    assert held.tensors["t49"].steps.tolist() == [49]


def test_a_folder_that_something_deleted_is_an_error_that_says_where(folder: SharedFolder, model: Path) -> None:
    held = folder.place_in_memory(weights(a=[1]))
    shutil.rmtree(folder.path)
    for act in (lambda: folder.place_in_memory(weights(1, a=[2])), lambda: folder.make_version(held, model), lambda: folder.retain()):
        with pytest.raises(WeightsError, match=f"{folder.path}.*No such file"):
            act()


def test_a_pull_that_writes_while_the_folder_is_removed_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, remove = SharedFolder(tmp_path), shutil.rmtree
    form = weights(a=[1, 2]).forms[0]
    buffer = folder.allocate(form)

    def write_and_remove(path: Path, *, ignore_errors: bool) -> None:
        with pytest.raises(WeightsError):
            folder.keep(form, buffer)
        remove(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(shared_folder.shutil, "rmtree", write_and_remove)
    folder.close()
    assert not list(tmp_path.iterdir())


def test_a_version_that_cannot_be_made_leaves_nothing(folder: SharedFolder, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = folder.place_in_memory(weights(a=[1]))

    def full(*args: object, **options: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(WeightsError, match=r"weights\.weights_shm"):
        folder.make_version(held, model)
    assert not names(folder.path / "unfinished")
    assert not names(folder.path / "versions")
