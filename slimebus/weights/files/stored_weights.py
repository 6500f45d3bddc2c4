"""Weights at a path, whether a model, a delta file or a chain: whether every byte is right."""

import contextlib
from pathlib import Path

from slimebus.bus.errors import WeightsError
from slimebus.weights.files import delta_file, disk_chain
from slimebus.weights.host.safetensors_file import as_weights, read_model
from slimebus.weights.messages import DELTA, SAME
from slimebus.weights.tensors import NO_BASE, checksum, hash_bytes, rounded


def is_chain(path: Path) -> bool:
    """True for the folder of a lineage."""
    return path.is_dir() and ((path / disk_chain.LATEST).is_file() or bool(disk_chain.part_files(path)))


def is_version_file(path: Path) -> bool:
    """True for what leads to a version, or is one: by its name or by how it begins."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return path.suffix in (".delta", ".full") or file.read(len(delta_file.MAGIC)) == delta_file.MAGIC


def verify(path: Path) -> tuple[str, list[str]]:
    """The digest of what lies there, and what is wrong with it, one line each; every byte is read. float32 counts as it is published."""
    try:
        if is_chain(path):
            return _verify_chain(path)
        if is_version_file(path):
            return _verify_file(path)
        return as_weights({name: rounded(tensor) for name, tensor in read_model(path).items()}).digest, []
    except WeightsError as bad:
        return "", [bad.text]


def _verify_file(path: Path) -> tuple[str, list[str]]:
    found = delta_file.read(path)
    if found.manifest.base == NO_BASE:
        return delta_file.apply(found, None).digest, []
    problems = []
    for entry in found.manifest.tensors:
        payload = b"".join(found.payloads.get(entry.name, ()))
        is_right = checksum(payload) == entry.payload_hash if entry.kind == DELTA else hash_bytes(payload) == entry.hash
        if entry.kind != SAME and not is_right:
            problems.append(f"tensor {entry.name!r} does not have the bytes that its manifest says")
    return found.manifest.digest, problems


def _verify_chain(folder: Path) -> tuple[str, list[str]]:
    """From the newest full copy delta by delta to the newest version, and each older delta for itself."""
    latest = disk_chain.read_latest(folder)
    if latest is None:
        return "", [f"no {disk_chain.LATEST}"]
    problems = []
    for file in [file for file, version in disk_chain.part_files(folder).items() if version <= latest.version]:
        with contextlib.suppress(FileNotFoundError):  # its trainer deletes what is old meanwhile
            problems += [f"{file.name}: {text}" for text in verify(file)[1]]
    latest = disk_chain.read_latest(folder) or latest
    needed = [*latest.files(latest.full, "full"), *latest.delta_files(latest.full)]
    missing = [f"{name} is missing" for name in needed if not (folder / name).is_file()]
    problems += missing if disk_chain.read_latest(folder) == latest else []
    return ("", problems) if problems else (disk_chain.DiskPuller(folder).pull(None, 1.0).digest, [])
