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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import xxhash

from slimebus.errors import WeightsError
from slimebus.weights import codec
from slimebus.weights.messages import DELTA, FULL, SAME, Manifest, TensorEntry
from slimebus.weights.plan import Memory, Plan, Target, check_names
from slimebus.weights.tensors import NO_BASE, STEPPED_DTYPES, Fingerprint, Tensor, Weights, digest_of, hash_bytes, tensor_bytes

MAGIC = b"SLMBDF01"
HEAD_BYTES = 32
MAX_MANIFEST_BYTES = 1 << 30
PIECE_BYTES = 1 << 20


class DeltaFile(NamedTuple):
    """A checked manifest, and of each tensor that has a payload the pieces of it, in order."""

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


@dataclass(frozen=True)
class _Payload:
    file: _OpenFile
    start: int
    end: int

    def __iter__(self) -> Iterator[bytes]:
        return self.file.pieces(self.start, self.end)


def write(path: Path, manifest: Manifest, payloads: Iterable[Any]) -> int:
    """Write the file whole or not at all, on disk when this returns; its size in bytes. payloads: in the manifest's order."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    encoded = msgspec.msgpack.encode(manifest)
    try:
        with unfinished.open("wb") as out:
            out.write(MAGIC + len(encoded).to_bytes(8, "little") + xxhash.xxh3_128_digest(encoded))
            out.write(encoded)
            for payload in payloads:
                out.write(payload)
            size = out.tell()
            out.flush()
            os.fsync(out.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return size


def read(path: Path) -> DeltaFile:
    """Open a file. Its manifest and all sizes are checked, not the payloads: `apply` does that. Raises WeightsError and OSError."""
    file = _OpenFile(path)
    head = b"".join(file.pieces(0, min(HEAD_BYTES, file.size)))
    length = int.from_bytes(head[8:16], "little")
    if head[:8] != MAGIC or len(head) < HEAD_BYTES or length > min(MAX_MANIFEST_BYTES, file.size - HEAD_BYTES):
        raise WeightsError(f"{path}: not a slimebus delta file, or cut off", retryable=False)
    encoded = b"".join(file.pieces(HEAD_BYTES, HEAD_BYTES + length))
    if xxhash.xxh3_128_digest(encoded) != head[16:]:
        raise WeightsError(f"{path}: its manifest does not have the bytes it was written with", retryable=False)
    try:
        manifest = msgspec.msgpack.decode(encoded, type=Manifest)
    except (msgspec.DecodeError, RecursionError) as bad:
        raise WeightsError(f"{path}: its manifest does not parse: {bad}", retryable=False) from None
    return DeltaFile(manifest, _payloads(file, manifest, HEAD_BYTES + length))


def _payloads(file: _OpenFile, manifest: Manifest, start: int) -> dict[str, Iterable[bytes]]:
    at, found = start, dict[str, Iterable[bytes]]()
    for entry in manifest.tensors:
        if entry.kind == SAME:
            continue
        if entry.size < 0 or (entry.kind == FULL and entry.size != tensor_bytes(entry.name, entry.dtype, entry.shape)):
            raise WeightsError(f"{file.path}: tensor {entry.name!r} cannot have {entry.size} bytes", retryable=False)
        found[entry.name] = _Payload(file, at, at + entry.size)
        at += entry.size
    if at != file.size:
        raise WeightsError(
            f"{file.path}: {file.size - start} bytes of payloads, its manifest says {at - start}; it is cut off or was written to",
            retryable=False,
        )
    return found


def joined(parts: Sequence[DeltaFile]) -> DeltaFile:
    """The files of several publishers, each with the tensors that it owns, as the one file of a single publisher."""
    first = parts[0].manifest
    if any((m.lineage, m.version) != (first.lineage, first.version) for m, _ in parts):
        raise WeightsError(f"the parts of version {first.version} are of different versions")
    entries = [entry for part in parts for entry in part.manifest.tensors]
    check_names(entries)
    digest = digest_of(Fingerprint(e.name, e.dtype, e.shape, e.hash) for e in entries)
    manifest = Manifest(lineage=first.lineage, version=first.version, digest=digest, tensors=entries, base=first.base)
    return DeltaFile(manifest, {name: payload for part in parts for name, payload in part.payloads.items()})


def between(base: Weights, target: Weights, *, zstd: bool = True) -> tuple[Manifest, list[Any]]:
    """What leads from base to target: a manifest and its payloads. A tensor that base lacks, or has in another form, is whole."""
    entries, payloads = [], []
    for name, tensor in target.tensors.items():
        entry, payload = _entry(name, tensor, base, target.hashes[name], zstd)
        entries.append(entry)
        if entry.kind != SAME:
            payloads.append(payload)
    manifest = Manifest(lineage=target.lineage, version=target.version, digest=target.digest, tensors=entries, base=base.version)
    return manifest, payloads


def _entry(name: str, tensor: Tensor, base: Weights, tensor_hash: str, zstd: bool) -> tuple[TensorEntry, Any]:
    old = base.tensors.get(name)
    form: dict[str, Any] = {"name": name, "dtype": tensor.dtype, "shape": tensor.shape, "hash": tensor_hash}
    is_same_form = old is not None and (old.dtype, old.shape) == (tensor.dtype, tensor.shape)
    if is_same_form and base.hashes[name] == tensor_hash:
        return TensorEntry(**form, kind=SAME), b""
    if old is None or not is_same_form or tensor.dtype not in STEPPED_DTYPES:
        return TensorEntry(**form, kind=FULL, size=len(tensor.buffer)), tensor.buffer.data
    encoded = codec.encode(old.steps, tensor.steps, zstd=zstd)
    if len(encoded.payload) >= len(tensor.buffer):
        return TensorEntry(**form, kind=FULL, size=len(tensor.buffer)), tensor.buffer.data
    delta = TensorEntry(
        **form,
        kind=DELTA,
        size=len(encoded.payload),
        num_changed=encoded.num_changed,
        payload_hash=hash_bytes(encoded.payload),
        base_hash=base.hashes[name],
    )
    return delta, encoded.payload


def apply(delta: DeltaFile, base: Weights | None, *, spare: Weights | None = None, memory: Memory | None = None) -> Weights:
    """The version that a file leads to, verified. base: None for a file of full tensors only. memory: where its new tensors come to be.

    Raises WeightsError when base is not what the file starts from, and when any byte is not what its writer hashed; OSError.
    """
    manifest = delta.manifest
    target, plan = Target(manifest.lineage, manifest.version), Plan(base, spare, memory=memory)
    if base is not None and (base.lineage, base.version) != (manifest.lineage, manifest.base):
        judged_by_hashes = Weights(manifest.lineage, manifest.base, base.digest, base.tensors, base.hashes)
        plan = Plan(judged_by_hashes, spare, memory=memory)
    check_names(manifest.tensors)
    plan.check_room(manifest.tensors)
    for job in plan.missing([manifest]):
        if job.entry.kind == SAME or (job.entry.kind == DELTA and job.base is None):
            start = "an empty base" if manifest.base == NO_BASE else f"version {manifest.base}"
            raise WeightsError(f"tensor {job.entry.name!r} of the base is not what the delta starts from ({start})", retryable=False)
        offset = 0
        for piece in delta.payloads[job.entry.name]:
            job.put(offset, memoryview(piece))
            offset += len(piece)
        if not job.is_right():
            raise WeightsError(f"tensor {job.entry.name!r} of version {manifest.version} does not have the bytes that its manifest says")
        plan.learn(job, target)
    return plan.finish([manifest], target)
