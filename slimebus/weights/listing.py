"""What lies at a path: the tensors of a model or of a delta file, the versions of a chain; and whether every byte is right."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from slimebus.errors import WeightsError
from slimebus.weights import delta_file, disk_chain
from slimebus.weights.comparison import natural
from slimebus.weights.messages import DELTA, FULL
from slimebus.weights.safetensors_file import read_model, read_weights
from slimebus.weights.tensors import NO_BASE, Tensor, Weights, hash_bytes

FILE_SUFFIXES = (".delta", ".full")


def is_chain(path: Path) -> bool:
    """True for the folder of a lineage."""
    return path.is_dir() and ((path / disk_chain.LATEST).is_file() or bool(disk_chain.part_files(path)))


def _is_file(path: Path) -> bool:
    """True for what leads to a version, or is one: by its name or by how it begins."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return path.suffix in FILE_SUFFIXES or file.read(len(delta_file.MAGIC)) == delta_file.MAGIC


def read(path: Path) -> Mapping[str, Tensor]:
    """The tensors of a model, of a .full file, or of the newest version of a chain. Raises WeightsError and OSError."""
    if is_chain(path):
        return disk_chain.DiskPuller(path).pull(None, 1.0).tensors
    return delta_file.apply(delta_file.read(path), None).tensors if _is_file(path) else read_model(path)


def rows_of(path: Path) -> list[dict[str, Any]]:
    """One row for each version of a chain, each tensor of a file or model. Raises WeightsError for anything else."""
    if is_chain(path):
        return list(_version_rows(path))
    if _is_file(path):
        entries = delta_file.read(path).manifest.tensors
        return [
            {
                "name": e.name,
                "dtype": e.dtype,
                "shape": list(e.shape),
                "kind": e.kind,
                "bytes": e.size,
                "changed": e.num_changed,
                "hash": e.hash,
            }
            for e in entries
        ]
    tensors = read_model(path)
    return [
        {"name": name, "dtype": t.dtype, "shape": list(t.shape), "bytes": len(t.buffer), "hash": hash_bytes(t.buffer)}
        for name, t in sorted(tensors.items(), key=lambda item: natural(item[0]))
    ]


def _version_rows(folder: Path) -> Iterator[dict[str, Any]]:
    for file in disk_chain.part_files(folder):
        with contextlib.suppress(FileNotFoundError):  # its trainer deletes what is old meanwhile
            size, manifest = file.stat().st_size, delta_file.read(file).manifest
            yield {
                "version": manifest.version,
                "file": file.name,
                "kind": file.suffix[1:],
                "lineage": manifest.lineage,
                "base": manifest.base,
                "bytes": size,
                "tensors": len(manifest.tensors),
                "changed": sum(entry.num_changed for entry in manifest.tensors),
                "digest": manifest.digest,
            }


def line_of(row: dict[str, Any]) -> str:
    """A row for a person."""
    if "version" in row:
        what = f"{row['changed']:>10} values changed" if row["kind"] == "delta" else f"{row['tensors']:>10} tensors"
        return f"{row['file']:<16} {row['bytes']:>12} bytes  {what:<25}  digest {row['digest']}"
    shape = "x".join(map(str, row["shape"])) or "scalar"
    kind = f"{row['kind']:<6}" if "kind" in row else ""
    return f"{row['name']:<56} {row['dtype']:<13} {shape:<14} {kind}{row['bytes']:>12} bytes  {row['hash']}"


def verify(path: Path, base: Weights | None) -> tuple[str, list[str]]:
    """The digest of what lies there, and what is wrong with it, one line each; every byte is read."""
    try:
        if is_chain(path):
            return _verify_chain(path)
        if _is_file(path):
            return _verify_file(path, base)
        return read_weights(path).digest, []
    except WeightsError as bad:
        return "", [bad.text]


def _verify_file(path: Path, base: Weights | None) -> tuple[str, list[str]]:
    found = delta_file.read(path)
    if base is not None or found.manifest.base == NO_BASE:
        return delta_file.apply(found, base).digest, []
    wanted = {e.name: e.payload_hash if e.kind == DELTA else e.hash for e in found.manifest.tensors if e.kind in (DELTA, FULL)}
    wrong = [name for name, pieces in found.payloads.items() if _hash(pieces) != wanted[name]]
    return found.manifest.digest, [f"tensor {name!r} does not have the bytes that its manifest says" for name in wrong]


def _hash(pieces: Iterable[bytes]) -> str:
    hasher = xxhash.xxh3_128()
    for piece in pieces:
        hasher.update(piece)
    return hasher.hexdigest()


def _verify_chain(folder: Path) -> tuple[str, list[str]]:
    """From the newest full copy delta by delta to the newest version, and each older delta for itself."""
    latest = disk_chain.read_latest(folder)
    if latest is None:
        return "", [f"no {disk_chain.LATEST}"]
    problems = []
    for file, version in disk_chain.part_files(folder).items():
        try:
            wrong = _verify_file(file, None)[1] if version <= latest.version else []
        except FileNotFoundError:  # its trainer deletes what is old meanwhile
            continue
        except WeightsError as bad:
            wrong = [bad.text]
        problems += [f"{file.name}: {text}" for text in wrong]
    latest = disk_chain.read_latest(folder) or latest
    needed = latest.files(latest.full, "full")
    needed += [name for version in range(latest.full + 1, latest.version + 1) for name in latest.files(version, "delta")]
    missing = [f"{name} is missing" for name in needed if not (folder / name).is_file()]
    problems += missing if disk_chain.read_latest(folder) == latest else []
    return ("", problems) if problems else (disk_chain.DiskPuller(folder).pull(None, 1.0).digest, [])
