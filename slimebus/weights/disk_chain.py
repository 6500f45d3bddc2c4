"""Versions through a directory that trainer and workers share: a mounted disk or bucket instead of a weight server.

    DIR/LINEAGE/000040.full      all tensors of version 40
    DIR/LINEAGE/000041.delta     what leads from 40 to 41
    DIR/LINEAGE/latest.json      {"version", "full", "digest", "check"}: replaced last, so a version is seen when it is complete

A reader that is at most `keep` versions behind takes deltas, any other the newest full copy and the deltas since. Every byte is
verified as in a pull. A lineage has a folder of its own, so nothing of another run can be taken for this one's.
"""

import contextlib
import os
import random
import re
import threading
import time
from pathlib import Path

import msgspec

from slimebus.errors import WeightsError
from slimebus.weights import delta_file
from slimebus.weights.host_share import HostShare
from slimebus.weights.messages import Manifest
from slimebus.weights.plan import Memory, Plan, PullCounts, Target
from slimebus.weights.stages import Stages
from slimebus.weights.store import VersionInfo, VersionStore
from slimebus.weights.tensors import NO_BASE, Weights, hash_bytes

SCHEME = "file://"
LATEST = "latest.json"
CHAIN_FILE = re.compile(r"latest\.json|[0-9]+\.(full|delta)|\.([0-9]+\.(full|delta)|latest\.json)\.[0-9]+\.unfinished")
LINEAGE = re.compile(r"[A-Za-z0-9_-]{1,128}")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0


class Latest(msgspec.Struct, kw_only=True):
    """The newest complete version and the newest full copy at or before it. check: xxh3_128 of `version full digest`."""

    version: int
    full: int
    digest: str
    check: str = ""

    def expected_check(self) -> str:
        return hash_bytes(f"{self.version} {self.full} {self.digest}".encode())


def chain_dir(root: Path, lineage: str) -> Path:
    """The folder of a lineage. Raises WeightsError for a name that is no folder name."""
    if not LINEAGE.fullmatch(lineage):
        raise WeightsError(f"lineage {lineage[:64]!r} cannot name a folder; expected letters, digits, - and _", retryable=False)
    return root / lineage


def full_path(folder: Path, version: int) -> Path:
    """The file with all tensors of a version."""
    return folder / f"{version:06d}.full"


def delta_path(folder: Path, version: int) -> Path:
    """The file with what leads to a version from the one before."""
    return folder / f"{version:06d}.delta"


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
    """The trainer's side: writes each version of a store, keeps what readers need, deletes the rest. Used by one thread."""

    def __init__(self, root: Path, lineage: str, *, keep: int = 8) -> None:
        self.folder, self.keep = chain_dir(root, lineage), keep
        self._has_published = False
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as bad:
            raise WeightsError(f"weights directory {root}: {bad.strerror}; it must be writable for the trainer", retryable=False) from None

    @property
    def address(self) -> str:
        """What workers are told; they look for the lineage under their own weights directory."""
        return f"{SCHEME}{self.folder.absolute()}"

    def publish(self, store: VersionStore) -> VersionInfo:
        """Write the newest version of the store. A repeat after a failure writes the same again. Raises WeightsError."""
        newest = store.newest
        if newest is None:
            raise WeightsError("the store has no version to publish", retryable=False)
        latest = read_latest(self.folder)
        if latest is not None and latest.version == newest.version:
            if latest.digest != newest.digest:
                raise WeightsError(f"version {newest.version} in {self.folder} is another one; two trainers write there", retryable=False)
            return newest
        if latest is not None and latest.version > newest.version:
            raise WeightsError(f"{self.folder} is at version {latest.version} already, this is {newest.version}; two trainers write there")
        try:
            full = self._write(store, newest, latest)
            self._announce(newest, full)
        except OSError as bad:
            raise WeightsError(f"version {newest.version} was not written under {self.folder}: {bad.strerror}") from None
        self._collect(newest.version, full)
        if not self._has_published:  # later it may be that a successor has deleted this lineage, and not the other way round
            self._forget_older_lineages()
        self._has_published = True
        return newest

    def _write(self, store: VersionStore, newest: VersionInfo, latest: Latest | None) -> int:
        """Write the delta where one leads here, a full copy where it is time; the version of the newest full copy."""
        if latest is not None and latest.version == newest.version - 1:
            manifest = store.manifest(store.lineage, latest.version)
            self._write_file(delta_path(self.folder, newest.version), store, manifest)
            if newest.version - latest.full < self.keep:
                return latest.full
        self._write_file(full_path(self.folder, newest.version), store, store.manifest("", NO_BASE))
        return newest.version

    def _write_file(self, path: Path, store: VersionStore, manifest: Manifest) -> None:
        base = {"delta": manifest.base}
        payloads = (
            store.read(store.lineage, manifest.version, entry.name, base.get(entry.kind, NO_BASE))
            for entry in manifest.tensors
            if entry.kind != "same"
        )
        delta_file.write(path, manifest, payloads)

    def _announce(self, newest: VersionInfo, full: int) -> None:
        latest = Latest(version=newest.version, full=full, digest=newest.digest)
        latest.check = latest.expected_check()
        unfinished = self.folder / f".{LATEST}.{os.getpid()}.unfinished"
        with unfinished.open("wb") as out:
            out.write(msgspec.json.encode(latest))
            out.flush()
            os.fsync(out.fileno())
        os.replace(unfinished, self.folder / LATEST)

    def _collect(self, newest: int, full: int) -> None:
        """Delete what no reader that begins now would take; one that has a file open keeps it."""
        first_delta = min(full, newest - self.keep) + 1
        for path in self.folder.iterdir():
            version = int(path.stem) if path.stem.isdigit() else None
            is_old = version is not None and version < (full if path.suffix == ".full" else first_delta)
            if is_old and path.suffix in (".full", ".delta"):
                with contextlib.suppress(OSError):
                    path.unlink()

    def _forget_older_lineages(self) -> None:
        """Nothing of an abandoned timeline is pulled any more; only files of a chain are deleted, also those that were cut short."""
        for folder in self.folder.parent.iterdir():
            if folder == self.folder or not LINEAGE.fullmatch(folder.name) or not folder.is_dir():
                continue
            for path in folder.iterdir():
                if CHAIN_FILE.fullmatch(path.name):
                    path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                folder.rmdir()


class DiskPuller:
    """A worker's side, with the face of a WeightPuller. folder: that of the lineage. host: as there."""

    def __init__(self, folder: Path, *, host: HostShare | None = None) -> None:
        self.folder, self.counts = folder, PullCounts()
        self._host, self.stages = host, Stages()
        self._cancelled = threading.Event()

    def pull(self, have: Weights | None = None, deadline_s: float = 60.0, *, spare: Weights | None = None) -> Weights:
        """The newest complete version, verified; `have` itself when it is that.

        Raises WeightsError when there was none within deadline_s seconds, or one that does not verify.
        """
        self.stages = Stages()
        if self._host is None:
            return self._pull(have, deadline_s, spare)
        self._host.begin()
        try:
            return self._pull(have, deadline_s, spare)
        finally:
            self._host.end()

    def _pull(self, have: Weights | None, deadline_s: float, spare: Weights | None) -> Weights:
        deadline, pause_s, reason = time.monotonic() + deadline_s, FIRST_PAUSE_S, f"no version in {self.folder} yet"
        while not self._cancelled.is_set():
            try:
                latest = read_latest(self.folder)
                if latest is not None:
                    self._check_newer(latest, have)
                    return self._shared(latest, have, deadline) or self._follow(latest, have, spare)
            except (WeightsError, OSError) as problem:  # a version that was collected under our feet, a file not yet visible, a stale mount
                reason = str(problem)
            if time.monotonic() + pause_s > deadline:
                raise WeightsError(f"no verified version within {deadline_s:.0f} s from {self.folder}: {reason}")
            self._cancelled.wait(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        raise WeightsError("the pull was cancelled")

    def _check_newer(self, latest: Latest, have: Weights | None) -> None:
        """A file server may show what has been replaced for a while; nobody goes back within a lineage."""
        if have is not None and have.lineage == self.folder.name and latest.version < have.version:
            raise WeightsError(f"{self.folder / LATEST} says version {latest.version}, and {have.version} was read before; it is stale")

    def _shared(self, latest: Latest, have: Weights | None, deadline: float) -> Weights | None:
        """The version without reading its payloads, when `have` and the neighbours have all of it; None when it is to be read."""
        if self._host is None:
            return None
        path = delta_path(self.folder, latest.version)
        try:
            found = self._read(path if path.is_file() else full_path(self.folder, latest.version)).manifest
        except WeightsError:  # damaged; there may be another way to this version
            return None
        plan, target = Plan(have, None, memory=self._host.folder, counts=self.counts), Target(found.lineage, found.version)
        self._host.share(plan, found.tensors, target, until=deadline, cancelled=self._cancelled)
        if plan.lacks(found.tensors):
            return None
        if have is not None and (have.lineage, have.version) == target:
            return have
        self.counts.pulls += 1
        return plan.finish([found], target)

    def _follow(self, latest: Latest, have: Weights | None, spare: Weights | None) -> Weights:
        is_ours = have is not None and have.lineage == self.folder.name
        if have is not None and is_ours and self._has_deltas(have.version, latest.version):
            try:
                return self._step(have, latest, spare)
            except WeightsError:
                self.counts.wrong_bytes += 1  # damaged on the way: the full copy and its deltas may be whole
        self.counts.full_tensors += 1
        whole = self._load(full_path(self.folder, latest.full), have, spare, is_last=latest.full == latest.version)
        return self._step(whole, latest, None)

    def _has_deltas(self, have: int, newest: int) -> bool:
        return all(delta_path(self.folder, version).is_file() for version in range(have + 1, newest + 1))

    def _step(self, weights: Weights, latest: Latest, spare: Weights | None) -> Weights:
        """Delta after delta; the versions between are passed on as memory for the next."""
        start = weights
        for version in range(weights.version + 1, latest.version + 1):
            before = weights
            weights = self._load(delta_path(self.folder, version), before, spare, is_last=version == latest.version)
            spare = before if before is not start else spare
        if weights.digest != latest.digest:
            raise WeightsError(f"version {latest.version} in {self.folder} has digest {weights.digest}, announced was {latest.digest}")
        self.counts.pulls += weights is not start
        return weights

    def _load(self, path: Path, base: Weights | None, spare: Weights | None, *, is_last: bool) -> Weights:
        """Only the last version of a chain is put into shared memory."""
        found = self._read(path)
        memory: Memory | None = None
        if self._host is not None:
            self._host.tell()
            memory = self._host.folder if is_last else None
        with self.stages("verify"):
            loaded = delta_file.apply(found, base, spare=spare, memory=memory)
        self.counts.received_bytes += path.stat().st_size
        return loaded

    def _read(self, path: Path) -> delta_file.DeltaFile:
        with self.stages("wire"):
            found = delta_file.read(path)
        if found.manifest.lineage != self.folder.name:
            raise WeightsError(f"{path} is of lineage {found.manifest.lineage}, its folder of {self.folder.name}", retryable=False)
        return found

    def cancel(self) -> None:
        """End a pull that another thread waits for; for good."""
        self._cancelled.set()

    def close(self) -> None:
        """The same; files are closed as they are read."""
        self._cancelled.set()
