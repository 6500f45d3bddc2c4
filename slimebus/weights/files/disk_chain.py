"""Versions through a directory that trainer and workers share: a mounted disk or bucket instead of a weight server.

    DIR/LINEAGE/000040-0.full    the tensors of version 40 that publisher 0 owns
    DIR/LINEAGE/000040-1.full    those of publisher 1
    DIR/LINEAGE/000041-0.delta   what leads from 40 to 41
    DIR/LINEAGE/000041-1.delta
    DIR/LINEAGE/latest.json      {"version", "full", "parts", "digest", "check"}: replaced last, so a version is seen when it is complete

Each publishing rank writes its own part; rank 0 replaces latest.json when all parts are there, and deletes what is old. A
reader that is at most `keep` versions behind takes deltas, any other the newest full copy and the deltas since. Every byte is
verified as in a pull. A lineage has a folder of its own, so nothing of another run can be taken for this one's.
"""

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from slimebus.atomic_file import replacing
from slimebus.bus.errors import FatalWeightsError, WeightsError
from slimebus.weights.files import delta_file
from slimebus.weights.messages import DELTA, SAME, Manifest
from slimebus.weights.pull.plan import PullPlan
from slimebus.weights.pull.pull_loop import HostPullSharing, PullLoop, RetryPull
from slimebus.weights.store.version_store import VersionStore
from slimebus.weights.tensors import NO_BASE, Target, Weights, checksum

log = logging.getLogger("slimebus.weights")

Result = TypeVar("Result")

SCHEME = "file://"
LATEST = "latest.json"
PART_FILE = re.compile(r"([0-9]+)-([0-9]+)\.(full|delta)")
CHAIN_FILE = re.compile(rf"latest\.json|{PART_FILE.pattern}|\.({PART_FILE.pattern}|latest\.json)\.[0-9]+\.unfinished")
LINEAGE = re.compile(r"[A-Za-z0-9_-]{1,128}")
FIRST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_WRITE_PAUSE_S = 0.02, 1.0, 10.0
UNAVAILABLE_S = 300.0
"""So long a publisher tries again where the directory is full or cannot be reached."""


class Latest(msgspec.Struct, kw_only=True):
    """The newest complete version, the newest full copy at or before it, and the number of files of each.

    digest: of the whole version. check: xxh3_128 of `version full parts digest`.
    """

    version: int
    full: int
    parts: int
    digest: str
    check: str = ""

    def expected_check(self) -> str:
        return checksum(f"{self.version} {self.full} {self.parts} {self.digest}".encode())

    def files(self, version: int, kind: str) -> list[str]:
        """The names of the parts of a version, `full` or `delta`."""
        return [part_file(version, part, kind) for part in range(self.parts)]

    def delta_files(self, have: int) -> list[str]:
        """The names of all deltas from the version `have` to this one."""
        return [name for version in range(have + 1, self.version + 1) for name in self.files(version, "delta")]


def part_file(version: int, part: int, kind: str) -> str:
    """The file with a publisher's tensors of a version (`full`), or with what leads to them from the version before (`delta`)."""
    return f"{version:06d}-{part}.{kind}"


def part_files(folder: Path) -> dict[Path, int]:
    """The files of versions in a chain, each with its version, oldest first."""
    found = {path: int(match[1]) for path in folder.iterdir() if (match := PART_FILE.fullmatch(path.name))}
    return dict(sorted(found.items(), key=lambda item: (item[1], item[0].suffix, item[0])))


def chain_dir(root: Path, lineage: str) -> Path:
    """The folder of a lineage. Raises WeightsError for a name that is no folder name."""
    if not LINEAGE.fullmatch(lineage):
        raise FatalWeightsError(f"lineage {lineage[:64]!r} cannot name a folder; expected letters, digits, - and _")
    return root / lineage


def read_latest(folder: Path) -> Latest | None:
    """The newest version of a chain; None before there is one. Raises WeightsError for a file that is torn or of another kind."""
    try:
        latest = msgspec.json.decode((folder / LATEST).read_bytes(), type=Latest)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as bad:
        raise WeightsError(f"{folder / LATEST}: {bad}") from None
    if latest.check != latest.expected_check():
        raise WeightsError(f"{folder / LATEST}: its check does not fit; it is being written, or was changed by hand")
    return latest


class DiskChain:
    """A publisher's side: writes its part of each version; on one of them, when all have, announces it and deletes what is old.

    part, parts: which publisher this is, from 0, and how many there are. Used by one thread. What fails is tried again for patience_s
    seconds, and each step may be repeated: the same is written again.
    """

    def __init__(
        self, root: Path, lineage: str, *, keep: int = 8, part: int = 0, parts: int = 1, patience_s: float = UNAVAILABLE_S
    ) -> None:
        self.folder, self.keep, self.part, self.parts = chain_dir(root, lineage), keep, part, parts
        self._patience_s, self._closing = patience_s, threading.Event()
        self._written = self._full = NO_BASE
        self._has_collected = False
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as bad:
            raise FatalWeightsError(f"weights directory {root}: {bad.strerror}; it must be writable for the trainer") from None

    @property
    def address(self) -> str:
        """The address that workers get; they look for the lineage under their own weights directory."""
        return f"{SCHEME}{self.folder.absolute()}"

    def write(self, store: VersionStore) -> None:
        """Write this part of the store's newest version: a delta where one leads here, and a full copy where it is time.

        All publishers write the same kinds. Raises WeightsError.
        """
        full = store.manifest("", NO_BASE)
        if full.version == self._written:
            return
        if full.version == self._written + 1 and self._written != NO_BASE:
            self._write_file("delta", store, store.manifest(store.lineage, self._written))
        if full.version - self._full >= self.keep or full.version != self._written + 1 or self._full == NO_BASE:
            self._write_file("full", store, full)
            self._full = full.version
        self._written = full.version

    def _write_file(self, kind: str, store: VersionStore, manifest: Manifest) -> None:
        path = self.folder / part_file(manifest.version, self.part, kind)

        def payloads() -> Iterator[memoryview]:
            for entry in manifest.tensors:
                if entry.kind != SAME:
                    base = manifest.base if entry.kind == DELTA else NO_BASE
                    yield store.read(store.lineage, manifest.version, entry.name, base)

        self._write_with_retries(manifest.version, lambda: delta_file.write(path, manifest, payloads()))

    def announce(self, version: int, digest: str) -> None:
        """Let readers see the version, once this part and all others are written. Raises WeightsError."""
        latest = self._write_with_retries(version, lambda: read_latest(self.folder))
        if latest is not None and (latest.version, latest.digest) == (version, digest):
            return
        if latest is not None and latest.version >= version:
            raise FatalWeightsError(
                f"{self.folder} is at version {latest.version}, digest {latest.digest}, already; this is {version}, digest {digest}; "
                "two trainers write there"
            )
        self._write_with_retries(
            version, lambda: self._replace_latest(Latest(version=version, full=self._full, parts=self.parts, digest=digest))
        )

    def collect(self, version: int) -> None:
        """Workers know of the version: delete what none that begins to read now would take. One that has a file open keeps it."""
        with contextlib.suppress(OSError):  # what is not deleted now is with a later version, and is in nobody's way
            first_delta = min(self._full, version - self.keep) + 1
            for path, number in part_files(self.folder).items():
                if number < (self._full if path.suffix == ".full" else first_delta):
                    path.unlink(missing_ok=True)
            if not self._has_collected:  # later it may be that a successor has deleted this lineage, and not the other way round
                self._forget_older_lineages()
        self._has_collected = True

    def close(self) -> None:
        """What fails from now on, also in another thread, is not tried again."""
        self._closing.set()

    def _write_with_retries(self, version: int, work: Callable[[], Result]) -> Result:
        deadline, pause_s = time.monotonic() + self._patience_s, FIRST_PAUSE_S
        while True:
            try:
                return work()
            except OSError as bad:
                problem = f"version {version} was not written under {self.folder}: {bad.strerror}"
                if isinstance(bad, FileNotFoundError):
                    raise WeightsError(f"{problem}; another trainer of this run deletes the folders of those before it") from None
                if time.monotonic() + pause_s > deadline or self._closing.wait(pause_s):
                    raise WeightsError(problem) from None
            if pause_s > LONGEST_PAUSE_S:
                log.warning("%s; trying again", problem)
            pause_s = min(2 * pause_s, LONGEST_WRITE_PAUSE_S)

    def _replace_latest(self, latest: Latest) -> None:
        latest.check = latest.expected_check()
        with replacing(self.folder / LATEST) as out:
            out.write(msgspec.json.encode(latest))

    def _forget_older_lineages(self) -> None:
        """Nothing of an abandoned timeline is pulled any more; only files of a chain are deleted, also those that were cut short."""
        for folder in self.folder.parent.iterdir():
            if folder == self.folder or not LINEAGE.fullmatch(folder.name) or not folder.is_dir():
                continue
            with contextlib.suppress(OSError):
                for path in folder.iterdir():
                    if CHAIN_FILE.fullmatch(path.name):
                        path.unlink(missing_ok=True)
                folder.rmdir()


class DiskPuller(PullLoop):
    """A worker's side. folder: that of the lineage. host: see PullLoop."""

    def __init__(self, folder: Path, *, host: HostPullSharing | None = None) -> None:
        super().__init__(str(folder), host)
        self.folder = folder

    def _pull_once(self, plan: PullPlan, deadline: float) -> Weights:
        try:
            latest = read_latest(self.folder)
            if latest is None:
                raise RetryPull("there is no version yet")
            if plan.have is not None and plan.have.lineage == self.folder.name and latest.version < plan.have.version:
                stale = f"says version {latest.version}, and {plan.have.version} was read before"
                raise RetryPull(f"{self.folder / LATEST} {stale}; it is stale")
            return self._check_digest(latest, self._take_from_host(latest, plan, deadline) or self._read_chain(latest, plan.have))
        except (WeightsError, OSError) as problem:  # a version that was collected under our feet, a file not yet visible, a stale mount
            raise RetryPull(str(problem)) from None

    def _check_digest(self, latest: Latest, weights: Weights) -> Weights:
        if weights.digest != latest.digest:
            raise WeightsError(f"version {latest.version} in {self.folder} has digest {weights.digest}, announced was {latest.digest}")
        return weights

    def _take_from_host(self, latest: Latest, plan: PullPlan, deadline: float) -> Weights | None:
        """The version without reading its payloads, when this worker and its neighbours have all of it; None when it is to be read."""
        if self._host is None:
            return None
        try:
            found = self._read(latest, latest.version, "delta" if self._has_deltas(latest, latest.version - 1) else "full").manifest
        except WeightsError:  # damaged; there may be another way to this version
            return None
        target = Target(found.lineage, found.version)
        self._host.take_from_host_or_lock(plan, found.tensors, target, until=deadline, cancelled=self._cancelled)
        if plan.lacks(found.tensors):
            return None
        if plan.have is not None and (plan.have.lineage, plan.have.version) == target:
            return plan.have
        return plan.finish(found.tensors, target)

    def _read_chain(self, latest: Latest, have: Weights | None) -> Weights:
        """All files are opened before the first is read, so that what is deleted meanwhile stays readable where the disk allows it."""
        if have is not None and have.lineage == self.folder.name and self._has_deltas(latest, have.version):
            try:
                return self._check_digest(latest, self._apply_files(self._deltas(latest, have.version), have))
            except WeightsError:
                self.counts["wrong_bytes"] += 1  # damaged on the way: the full copy and its deltas may be whole
        self.counts["full_tensors"] += 1
        return self._apply_files([self._read(latest, latest.full, "full"), *self._deltas(latest, latest.full)], have)

    def _has_deltas(self, latest: Latest, have: int) -> bool:
        """From the version `have` to the newest."""
        return all((self.folder / name).is_file() for name in latest.delta_files(have))

    def _deltas(self, latest: Latest, have: int) -> list[delta_file.DeltaFile]:
        return [self._read(latest, version, "delta") for version in range(have + 1, latest.version + 1)]

    def _apply_files(self, files: Sequence[delta_file.DeltaFile], have: Weights | None) -> Weights:
        """Apply the files in order. Only the last version is put into shared memory."""
        weights = have
        for found in files:
            folder = self._host.folder if self._host is not None and found is files[-1] else None
            watched = found._replace(payloads={name: self._watch_pieces(pieces) for name, pieces in found.payloads.items()})
            with self.stages("verify"):
                weights = delta_file.apply(watched, weights, folder=folder)
        assert weights is not None, "there are files, or there is nothing newer than `have`"
        return weights

    def _watch_pieces(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        """The pieces of a payload; neighbours hear that they are being read, and a pull that is cancelled ends between two."""
        for piece in pieces:
            if self._cancelled.is_set():
                raise WeightsError("the pull was cancelled")
            if self._host is not None:
                self._host.touch()
            self.counts["received_bytes"] += len(piece)
            yield piece

    def _read(self, latest: Latest, version: int, kind: str) -> delta_file.DeltaFile:
        with self.stages("wire"):
            found = delta_file.joined([delta_file.read(self.folder / name) for name in latest.files(version, kind)])
        says = found.manifest
        if (says.lineage, says.version) != (self.folder.name, version):
            wrong = f"{self.folder / part_file(version, 0, kind)} is of version {says.version} of lineage {says.lineage}"
            raise FatalWeightsError(f"{wrong}; expected was {version} of {self.folder.name}")
        return found
