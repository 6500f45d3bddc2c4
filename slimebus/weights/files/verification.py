"""Whether every byte of what lies at a path is right: of a model, of a delta file, of a chain."""

import contextlib
from collections.abc import Mapping
from pathlib import Path

from slimebus.bus.errors import WeightsError
from slimebus.weights.codec.rounding import rounded
from slimebus.weights.files import delta_file, disk_chain
from slimebus.weights.files.listing import is_chain, is_version_file
from slimebus.weights.files.safetensors_file import as_weights, read_model
from slimebus.weights.messages import DELTA, SAME
from slimebus.weights.tensors import NO_BASE, Tensor, checksum, hash_bytes


def verify(path: Path, base: Mapping[str, Tensor] | None) -> tuple[str, list[str]]:
    """The digest of what lies there, and what is wrong with it, one line each; every byte is read. float32 counts as it is published."""
    try:
        if is_chain(path):
            return _verify_chain(path)
        if is_version_file(path):
            return _verify_file(path, base)
        return as_weights({name: rounded(tensor) for name, tensor in read_model(path).items()}).digest, []
    except WeightsError as bad:
        return "", [bad.text]


def _verify_file(path: Path, base: Mapping[str, Tensor] | None) -> tuple[str, list[str]]:
    found = delta_file.read(path)
    if base is not None or found.manifest.base == NO_BASE:
        start = None if base is None else delta_file.base_for(found, base)
        return delta_file.apply(found, start).digest, []
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
            problems += [f"{file.name}: {text}" for text in verify(file, None)[1]]
    latest = disk_chain.read_latest(folder) or latest
    needed = [*latest.files(latest.full, "full"), *latest.delta_files(latest.full)]
    missing = [f"{name} is missing" for name in needed if not (folder / name).is_file()]
    problems += missing if disk_chain.read_latest(folder) == latest else []
    return ("", problems) if problems else (disk_chain.DiskPuller(folder).pull(None, 1.0).digest, [])
