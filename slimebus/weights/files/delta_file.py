"""A manifest and its payloads in one file: a delta between two versions, or a full copy of one.

    0         8                 16                    32                32 + N
    +---------+-----------------+---------------------+-----------------+-----------+-----------+-----
    | "SLMBDF01" | N, u64 little-endian | xxh3_128 of the manifest | manifest, msgpack | payload 0 | payload 1 | ...
    +---------+-----------------+---------------------+-----------------+-----------+-----------+-----

Payloads follow in the order of the manifest's tensors, one for each that is not `same`. docs/weights.md says what they are.
"""

import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from slimebus.atomic_file import replacing
from slimebus.bus.errors import FatalWeightsError, WeightsError
from slimebus.weights.host.shared_folder import SharedFolder
from slimebus.weights.messages import DELTA, FULL, SAME, Manifest, check_names, decode_manifest
from slimebus.weights.pull.plan import PullPlan, TensorDownload
from slimebus.weights.pull.verify import verify_tensor
from slimebus.weights.tensors import NO_BASE, Target, Weights, checksum, digest_of

MAGIC = b"SLMBDF01"
HEAD_BYTES = 32
MAX_MANIFEST_BYTES = 1 << 30
PIECE_BYTES = 1 << 20


class DeltaFile(NamedTuple):
    """A checked manifest, and of each tensor that has a payload the pieces of it, in order, to be read once."""

    manifest: Manifest
    payloads: Mapping[str, Iterable[bytes]]


class _OpenFile:
    """Read, not mapped: of a mapped file that its server has deleted, or cannot reach, the next byte would end the process."""

    def __init__(self, path: Path) -> None:
        self.path, self._descriptor = path, os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        self.size = os.fstat(self._descriptor).st_size

    def pieces(self, start: int, end: int) -> Iterator[bytes]:
        """Raises OSError, and WeightsError where the file has become shorter."""
        while start < end:
            piece = os.pread(self._descriptor, min(PIECE_BYTES, end - start), start)
            if not piece:
                raise WeightsError(f"{self.path} was cut off while it was read")
            yield piece
            start += len(piece)


def write(path: Path, manifest: Manifest, payloads: Iterable[Any]) -> int:
    """Write the file whole or not at all, on disk when this returns; its size in bytes. payloads: in the manifest's order."""
    encoded = msgspec.msgpack.encode(manifest)
    with replacing(path) as out:
        out.write(MAGIC + len(encoded).to_bytes(8, "little") + bytes.fromhex(checksum(encoded)))
        out.write(encoded)
        for payload in payloads:
            out.write(payload)
        return out.tell()


def read(path: Path) -> DeltaFile:
    """Open a file. Its manifest and all sizes are checked, not the payloads: `apply` does that. Raises WeightsError and OSError."""
    file = _OpenFile(path)
    head = b"".join(file.pieces(0, min(HEAD_BYTES, file.size)))
    length = int.from_bytes(head[8:16], "little")
    if head[:8] != MAGIC or len(head) < HEAD_BYTES or length > min(MAX_MANIFEST_BYTES, file.size - HEAD_BYTES):
        raise FatalWeightsError(f"{path}: not a slimebus delta file, or cut off")
    encoded = b"".join(file.pieces(HEAD_BYTES, HEAD_BYTES + length))
    if bytes.fromhex(checksum(encoded)) != head[16:]:
        raise FatalWeightsError(f"{path}: its manifest does not have the bytes it was written with")
    manifest = decode_manifest(encoded, path)
    return DeltaFile(manifest, _payloads(file, manifest, HEAD_BYTES + length))


def _payloads(file: _OpenFile, manifest: Manifest, start: int) -> dict[str, Iterable[bytes]]:
    at, found = start, dict[str, Iterable[bytes]]()
    for entry in manifest.tensors:
        if entry.kind == SAME:
            continue
        found[entry.name] = file.pieces(at, at + entry.size)
        at += entry.size
    if at != file.size:
        has = f"{file.size - start} bytes of payloads, its manifest says {at - start}"
        raise FatalWeightsError(f"{file.path}: {has}; it is cut off or was written to")
    return found


def joined(parts: Sequence[DeltaFile]) -> DeltaFile:
    """The files of several publishers, each with the tensors that it owns, as the one file of a single publisher."""
    first = parts[0].manifest
    if any((m.lineage, m.version) != (first.lineage, first.version) for m, _ in parts):
        raise WeightsError(f"the parts of version {first.version} are of different versions")
    entries = [entry for part in parts for entry in part.manifest.tensors]
    check_names(entries)
    manifest = msgspec.structs.replace(first, tensors=entries, digest=digest_of(entry.form for entry in entries))
    return DeltaFile(manifest, {name: payload for part in parts for name, payload in part.payloads.items()})


def apply(delta: DeltaFile, base: Weights | None, *, folder: SharedFolder | None = None) -> Weights:
    """The version that a file leads to, verified. base: None for a file of full tensors only. folder: where its new tensors come to be.

    The bytes of base decide, not its lineage and version. Raises WeightsError when it is not what the file starts from, and when any
    byte is not what its writer hashed; OSError.
    """
    manifest = delta.manifest
    target, plan = Target(manifest.lineage, manifest.version), PullPlan(base, folder=folder)
    check_names(manifest.tensors)
    if base is not None and manifest.base != NO_BASE:
        _check_base(manifest, base)
    plan.check_room(manifest.tensors)
    for entry in manifest.tensors:
        if plan.has(entry):
            continue
        if entry.kind == SAME or (entry.kind == DELTA and base is None):
            raise FatalWeightsError(f"tensor {entry.name!r} of version {manifest.version} is {entry.kind}, and there is no base")
        download = TensorDownload(entry, plan.known[entry.name] if entry.kind == DELTA else None, folder)
        offset = 0
        for piece in delta.payloads[entry.name]:
            download.write(offset, memoryview(piece))
            offset += len(piece)
        if not verify_tensor(download):
            raise WeightsError(f"tensor {entry.name!r} of version {manifest.version} does not have the bytes that its manifest says")
        plan.keep_verified(download, target)
    return plan.finish(manifest.tensors, target)


def _check_base(manifest: Manifest, base: Weights) -> None:
    """Raises WeightsError unless a delta starts from these tensors, saying what they are and what it expects."""
    before = {form.name: form for form in base.forms}
    for entry in manifest.tensors:
        expected = entry.form._replace(hash=entry.base_hash if entry.kind == DELTA else entry.hash)
        found = before.get(entry.name)
        if entry.kind != FULL and found != expected:
            has = f"{found.kind}, hash {found.hash}" if found else "no such tensor"
            raise FatalWeightsError(
                f"tensor {entry.name!r} of the base is not what the delta starts from (version {manifest.base}): "
                f"the base has {has}; expected {expected.kind}, hash {expected.hash}"
            )
