"""A worker's folder of tensors in shared memory: a file for each content, versions as folders of links, and its neighbours' folders.

ROOT/slimebus-weights-PID-xxxx/
    alive            locked for as long as its worker lives
    unfinished/      files that a pull is filling
    tensors/         verified ones; neighbours link them into their own folder
    reusable/           those that no version here needs any more, one for each form: their pages are written again
    versions/N/      a model directory: index, config, links to tensors: what a worker hands to its engines
"""

import contextlib
import dataclasses
import errno
import itertools
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slimebus.bus.errors import WeightsError
from slimebus.weights.host import tensor_file
from slimebus.weights.host.file_lock import FileLock
from slimebus.weights.host.safetensors_file import INDEX_FILE, copy_config
from slimebus.weights.host.tensor_file import file_name, header_of, map_file, reusable_name
from slimebus.weights.tensors import Tensor, TensorForm, Weights, tensor_bytes


@dataclass(frozen=True)
class SharedTensor:
    """One tensor's bytes: little-endian, C order, in `file` from `offset` on, which is a multiple of 64. hash: BLAKE3 of them."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    hash: str
    file: Path
    offset: int

    @property
    def size_bytes(self) -> int:
        return tensor_bytes(self.name, self.dtype, self.shape)

    def read(self) -> NDArray[np.uint8]:
        """The bytes, mapped: [size_bytes]. Raises WeightsError when the version is gone."""
        try:
            with _opened(self.file, os.O_RDONLY) as descriptor:
                return map_file(descriptor, self.offset + self.size_bytes, "read")[self.offset :]
        except OSError as bad:
            raise WeightsError(f"{self.file}: {bad.strerror}; is there a newer version already?") from None


@dataclass(frozen=True)
class SharedVersion:
    """A version that an engine on this machine may map. Files stay until a newer version is served, mappings longer.

    directory: the same tensors as a model directory, for engines that load from disk. A tensor that did not change since the version
    before has the same hash and the same bytes in memory.
    """

    lineage: str
    version: int
    digest: str
    directory: Path
    tensors: Mapping[str, SharedTensor]

    @property
    def tag(self) -> str:
        """The weight version that an engine gets with it."""
        return f"{self.lineage}:{self.version}"


PREFIX = "slimebus-weights-"
LOCK_PREFIX = "slimebus-pull-"
"""Of the file that the workers of one user and run lock in turn."""
ALIVE = "alive"
BEGINNING_S = 60.0
"""A folder that is not locked and younger than this may be of a worker that is just beginning."""

MIN_REUSED_BYTES = 1 << 16
"""A smaller file is made sooner than looked after."""

Buffer = NDArray[np.uint8]


class SharedFolder:
    """Used by one pull at a time. `find` gives no byte that does not hash to what was asked for, from any writer."""

    def __init__(self, root: Path) -> None:
        """Raises OSError."""
        self.root = root
        remove_stale_files(root)
        self._alive = _make_folder(root)
        self.path = self._alive.path.parent
        names = ("unfinished", "tensors", "reusable", "versions")
        self._unfinished, self._tensors, self._reusable, self._versions = folders = [self.path / name for name in names]
        for folder in folders:
            folder.mkdir()
        self._filling: dict[int, tuple[Buffer, Path]] = {}
        self._numbers = itertools.count()  # of threads that allocate at once

    # --- a pull's memory ---

    def allocate(self, form: TensorForm) -> Buffer:
        """A place for a tensor's bytes, in a file that nobody sees before `keep`. Raises WeightsError where there is no room."""
        path = self._new_path()
        try:
            with self._problems(form.size):
                buffer = self._reuse(path, form)
                if buffer is None:
                    buffer = self._create(path, form)
        except WeightsError:
            path.unlink(missing_ok=True)
            raise
        self._filling[id(buffer)] = buffer, path
        return buffer

    def _create(self, path: Path, form: TensorForm) -> Buffer:
        with _opened(path, os.O_CREAT | os.O_RDWR) as descriptor:
            try:
                return tensor_file.create(descriptor, form)
            except OSError as bad:
                files = self._reusable_files()
                if bad.errno != errno.ENOSPC or not files:
                    raise
                for reusable in files:
                    reusable.unlink(missing_ok=True)
                return tensor_file.create(descriptor, form)

    def _reuse(self, path: Path, form: TensorForm) -> Buffer | None:
        """The memory of a reusable file, which is at `path` then. One that somebody still has open, mapped or linked is left to them."""
        if form.size < MIN_REUSED_BYTES:
            return None
        for folder in self._reusable_folders():
            with contextlib.suppress(OSError):
                (folder / reusable_name(file_name(form))).rename(path)  # of several workers one can
                path.chmod(0o600)
                with _opened(path, os.O_RDWR) as descriptor:
                    return tensor_file.reuse(descriptor, form)
            path.unlink(missing_ok=True)
        return None

    def _reusable_folders(self) -> Iterator[Path]:
        """This worker's, then its neighbours': a file that they shared is with the last of them."""
        yield self._reusable
        yield from (folder / self._reusable.name for folder in self._neighbours())

    def _neighbours(self) -> list[Path]:
        """The folders of the other workers of this user."""
        return [folder for folder in _folders(self.root) if folder != self.path]

    def _reusable_files(self) -> list[Path]:
        return [file for folder in self._reusable_folders() for file in folder.glob(f"*{tensor_file.SUFFIX}")]

    def keep(self, form: TensorForm, buffer: Buffer) -> None:
        """The allocated buffer is filled and verified: from now on it is read-only, and neighbours may take it."""
        _, path = self._filling.pop(id(buffer))
        buffer.flags.writeable = False
        with self._problems():
            path.chmod(0o400)
            path.rename(self._tensors / file_name(form))

    def discard_unfinished(self) -> None:
        """What was allocated and not kept goes back to the system."""
        for _, path in self._filling.values():
            path.unlink(missing_ok=True)
        self._filling.clear()

    def find(self, forms: Iterable[TensorForm]) -> Iterator[tuple[TensorForm, Buffer, bool]]:
        """Those of the tensors that are on this host, verified; True: from a neighbour. Damaged ones are passed over."""
        wanted = {file_name(form): form for form in forms}
        for folder in (self._tensors, *(neighbour / self._tensors.name for neighbour in self._neighbours())):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                for name in wanted.keys() & set(os.listdir(folder)):
                    buffer = self._link_file(folder / name, wanted[name])
                    if buffer is not None:
                        yield wanted.pop(name), buffer, folder != self._tensors

    def _link_file(self, path: Path, form: TensorForm) -> Buffer | None:
        link = self._new_path()
        try:
            os.link(path, link, follow_symlinks=False)
            with _opened(link, os.O_RDONLY) as descriptor:
                status = os.fstat(descriptor)
                is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
                buffer = tensor_file.read(descriptor, form) if is_ours else None
            if buffer is not None:
                link.replace(self._tensors / file_name(form))
            return buffer
        except OSError:  # taken back by its owner meanwhile, or not ours to link
            return None
        finally:
            link.unlink(missing_ok=True)

    def _new_path(self) -> Path:
        return self._unfinished / f"{next(self._numbers)}{tensor_file.SUFFIX}"

    def check_room(self, size: int) -> None:
        """Raises WeightsError when `size` bytes are neither free nor in reusable files."""
        with self._problems():
            free = shutil.disk_usage(self.root).free
            if size > free and size > free + sum(_size_of(reusable) for reusable in self._reusable_files()):
                raise self._no_room(size)

    @contextlib.contextmanager
    def _problems(self, size: int = 0) -> Iterator[None]:
        """What goes wrong with files of this folder, as WeightsError. size: bytes of tensors that are being written."""
        try:
            yield
        except OSError as bad:
            if bad.errno == errno.ENOSPC:
                raise self._no_room(size) from None
            raise WeightsError(f"{bad.filename or self.path}: {bad.strerror}; does something else delete files there?") from None

    def _no_room(self, size: int) -> WeightsError:
        free = shutil.disk_usage(self.root).free
        return WeightsError(
            f"{self.root} has no room for {size} bytes of tensors: {free} are free. It must hold the model and what changes between two "
            "versions: make it larger, or set weights.weights_shm to a larger memory-backed directory"
        )

    # --- versions ---

    def place_in_memory(self, weights: Weights) -> Weights:
        """The same version with every tensor in this folder; what came by another way is copied into it."""
        tensors = {form.name: self._place_tensor(form, weights.tensors[form.name]) for form in weights.forms}
        return dataclasses.replace(weights, tensors=tensors)

    def _place_tensor(self, form: TensorForm, tensor: Tensor) -> Tensor:
        if (self._tensors / file_name(form)).exists():
            return tensor
        buffer = self.allocate(form)
        np.copyto(buffer, tensor.buffer)
        self.keep(form, buffer)
        return tensor._replace(buffer=buffer)

    def make_version(self, weights: Weights, config_from: Path) -> SharedVersion:
        """A version with all its tensors held here, as a model directory that appears when it is complete. config_from: a model's."""
        forms = weights.forms
        directory = self._versions / f"{weights.version}-{next(self._numbers)}"
        unfinished = self._unfinished / directory.name
        try:
            with self._problems():
                unfinished.mkdir()
                copy_config(config_from, unfinished)
                for form in forms:
                    os.link(self._tensors / file_name(form), unfinished / file_name(form))
                # What transformers and SGLang read, and in its metadata what slimebus' own engine does.
                origin = {"lineage": weights.lineage, "version": weights.version, "digest": weights.digest}
                metadata = {"total_size": weights.size_bytes, **origin, "hashes": dict(weights.hashes)}
                index = {"metadata": metadata, "weight_map": {form.name: file_name(form) for form in forms}}
                (unfinished / INDEX_FILE).write_text(json.dumps(index))
                unfinished.rename(directory)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        tensors = {form.name: SharedTensor(*form, file=directory / file_name(form), offset=len(header_of(form))) for form in forms}
        return SharedVersion(weights.lineage, weights.version, weights.digest, directory, tensors)

    def retain(self, *versions: SharedVersion) -> None:
        """Only these are still here. Who has a file of the others mapped, or linked into its own folder, keeps it.

        One file of each form becomes reusable: the next version is written into its pages, for fresh ones cost three times a copy.
        """
        directories = {version.directory for version in versions}
        with self._problems():
            needed = {name for directory in directories for name in os.listdir(directory)}
            for directory in self._versions.iterdir():
                if directory not in directories:
                    shutil.rmtree(directory, ignore_errors=True)
            for name in set(os.listdir(self._tensors)) - needed:
                (self._tensors / name).rename(self._reusable / reusable_name(name))
            for name in set(os.listdir(self._reusable)) - set(map(reusable_name, needed)):
                (self._reusable / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Give everything back. What a pull that is under way in another thread writes from now on finds no folder."""
        closed = self.path.with_name(f"{self.path.name}-closed")
        with contextlib.suppress(OSError):  # closed before
            self.path.rename(closed)
        shutil.rmtree(closed, ignore_errors=True)
        self._alive.release()


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _size_of(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


# --- folders of workers ---


def remove_stale_files(root: Path) -> None:
    """Free the shared memory of workers that were killed before they could do it, and delete the lock files of their pulls."""
    for path in root.glob(f"{LOCK_PREFIX}{os.geteuid()}-*"):
        with contextlib.suppress(OSError):
            if (lock := FileLock(path)).acquire():
                lock.release()
    for folder in _folders(root):
        with contextlib.suppress(OSError):
            alive = FileLock(folder / ALIVE)
            is_beginning = not alive.path.exists() and time.time() - folder.stat().st_mtime < BEGINNING_S
            if not is_beginning and alive.acquire():
                shutil.rmtree(folder, ignore_errors=True)
                alive.release()


def _folders(root: Path) -> list[Path]:
    """Of this user: in a memory that others share nothing else is touched."""
    found = []
    for folder in root.glob(f"{PREFIX}*-*"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                found.append(folder)
    return found


def _make_folder(root: Path) -> FileLock:
    """The lock in a new folder, which says that its owner lives."""
    for _ in range(10):
        alive = FileLock(Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=root)) / ALIVE)
        if alive.acquire():
            return alive  # else another's remove_stale_files came between
    raise OSError(errno.EBUSY, f"no folder under {root} stays; something deletes them")
