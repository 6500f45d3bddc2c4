"""Model directories: write a version so that any engine can load it, and read one without torch.

8 bytes: header length N, u64 little-endian | N bytes: JSON {name: {dtype, shape, data_offsets}} | the tensors' bytes
"""

import json
import operator
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slimebus.errors import WeightsError
from slimebus.weights.mapped_file import Access, map_file
from slimebus.weights.tensors import Tensor, Weights, hash_bytes, tensor_bytes, version_digest

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SHARD = re.compile(r"(.*)-[0-9]+-of-([0-9]{1,9})\.safetensors")
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""

CODES = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "bool": "BOOL",
}
DTYPES = {code: dtype for dtype, code in CODES.items()}
NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".index.json")


def write_model(
    directory: Path, weights: Weights | Mapping[str, Tensor], *, config_from: Path | None = None, metadata: Mapping[str, str] | None = None
) -> Path:
    """Make `directory` a model that transformers and SGLang load: model.safetensors, and the small files of config_from beside it.

    Each file appears whole or not at all: a reader sees the model before or the model after. Returns the weights file.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if config_from is not None:
        copy_config(config_from, directory)
    path = directory / WEIGHTS_FILE
    write_file(path, weights.tensors if isinstance(weights, Weights) else weights, metadata=metadata)
    (directory / INDEX_FILE).unlink(missing_ok=True)  # of shards that this one file replaces
    return path


def copy_config(model: Path, directory: Path) -> None:
    """Put all files of a model beside its weights into `directory`."""
    for file in sorted(model.iterdir()):
        if file.is_file() and not file.name.endswith(NOT_COPIED):
            _copy(file, directory / file.name)


def write_file(path: Path, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None) -> None:
    """Write one safetensors file atomically, tensors aligned to 8 bytes."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        with unfinished.open("wb") as out:
            ordered = sorted(tensors.items(), key=lambda item: (-_alignment(item[1]), item[0]))
            out.write(_header(ordered, metadata or {"format": "pt"}))
            for _, tensor in ordered:
                out.write(tensor.buffer.data)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def read_model(path: Path, access: Access = "read") -> dict[str, Tensor]:
    """The tensors of a safetensors file or of a directory's: model.safetensors, else the shards of the index, else every .safetensors file.

    Memory-mapped, not to be written to. Raises WeightsError naming the file where one is missing, malformed or not what the index says.
    """
    tensors: dict[str, Tensor] = {}
    for file, promised in _files(path).items():
        found = dict(read_file(file, access))
        if twice := sorted(tensors.keys() & found.keys()):
            raise WeightsError(f"{file}: tensor {twice[0]!r} is in another file of {path} too", retryable=False)
        tensors |= found
        if lacking := sorted(promised - found.keys()):
            raise WeightsError(
                f"{file}: {len(lacking)} tensors that {INDEX_FILE} says are in it are not, such as {lacking[0]!r}", retryable=False
            )
    return tensors


def read_weights(path: Path, *, lineage: str = "", version: int = 0) -> Weights:
    """A model directory or file as a version, its tensors hashed."""
    return as_weights(read_model(path), lineage=lineage, version=version)


def as_weights(tensors: Mapping[str, Tensor], *, lineage: str = "", version: int = 0) -> Weights:
    """Tensors as a version, hashed."""
    hashes = {name: hash_bytes(tensor.buffer) for name, tensor in tensors.items()}
    return Weights(lineage, version, version_digest(tensors, hashes), tensors, hashes)


def read_file(path: Path, access: Access = "read") -> Iterator[tuple[str, Tensor]]:
    """The tensors of one file. Every offset is checked before it is used."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(MAX_HEADER_BYTES, size - 8):
            raise WeightsError(f"{path}: not a safetensors file: header of {length} bytes in a file of {size}", retryable=False)
        try:
            header: Any = json.loads(file.read(length), object_pairs_hook=_without_repeats)
        except (ValueError, RecursionError) as bad:
            raise WeightsError(f"{path}: its safetensors header is not JSON: {bad}", retryable=False) from None
        data = map_file(file.fileno(), size, access, at_once=access == "private")[8 + length :]
    if not isinstance(header, dict):
        raise WeightsError(f"{path}: its safetensors header is not a JSON object", retryable=False)
    places = []
    for name, described in header.items():
        if name != "__metadata__":
            tensor, start = _tensor(path, name, described, data)
            places.append((start, start + len(tensor.buffer)))
            yield name, tensor
    _check_whole(path, sorted(places), len(data))


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("a name that stands there twice")
    return dict(pairs)


def _check_whole(path: Path, places: list[tuple[int, int]], size: int) -> None:
    """The format knows neither gaps nor bytes of two tensors: where there are any, offsets lie."""
    at = 0
    for start, end in places:
        if start != at:
            raise WeightsError(
                f"{path}: its tensors {'overlap' if start < at else 'leave a gap'} at byte {min(start, at)}", retryable=False
            )
        at = end
    if at != size:
        raise WeightsError(f"{path}: {size - at} bytes after its last tensor", retryable=False)


def _tensor(path: Path, name: str, described: Any, data: Any) -> tuple[Tensor, int]:
    """The tensor, and where it starts."""
    try:
        dtype, shape = DTYPES[described["dtype"]], tuple(operator.index(size) for size in described["shape"])
        start, end = (operator.index(offset) for offset in described["data_offsets"])
    except (KeyError, TypeError, ValueError) as bad:
        raise WeightsError(f"{path}: tensor {name!r} is described by {described!r}: {bad!r}", retryable=False) from None
    if not 0 <= start <= end <= len(data) or end - start != tensor_bytes(name, dtype, shape):
        raise WeightsError(
            f"{path}: tensor {name!r}, {dtype} of shape {list(shape)}, says bytes {start} to {end} of {len(data)}; is the file whole?",
            retryable=False,
        )
    return Tensor(dtype, shape, data[start:end]), start


def _files(path: Path) -> dict[Path, set[str]]:
    """The files of a model, each with the names that an index says are in it."""
    index, single = path / INDEX_FILE, path / WEIGHTS_FILE
    if path.is_file() or single.is_file():
        return {path if path.is_file() else single: set()}
    if not index.is_file():
        return {file: set() for file in _without_index(path)}
    files: dict[Path, set[str]] = {}
    try:
        for name, file in json.loads(index.read_text())["weight_map"].items():
            files.setdefault(path / file, set()).add(name)
    except (ValueError, KeyError, TypeError, AttributeError) as bad:
        raise WeightsError(f"{index}: expected a JSON object with a weight_map: {bad!r}", retryable=False) from None
    if missing := sorted(str(file) for file in files if file.parent != path or not file.is_file()):
        raise WeightsError(f"{index}: shards are missing or outside of {path}: {', '.join(missing)}", retryable=False)
    return files


def _without_index(path: Path) -> list[Path]:
    """Every .safetensors file of a directory. Raises WeightsError where there is none, or where their names say that some are missing."""
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise WeightsError(f"{path} has no .safetensors file; is it a Hugging Face model directory?", retryable=False)
    shards = Counter((found[1], int(found[2])) for file in files if (found := SHARD.fullmatch(file.name)))
    for (name, total), count in shards.items():
        if count != total:
            raise WeightsError(f"{path}: {count} of the {total} shards of {name} are there, and no {INDEX_FILE}", retryable=False)
    return files


def _header(ordered: list[tuple[str, Tensor]], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, tensor in ordered:
        end = offset + len(tensor.buffer)
        header[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _alignment(tensor: Tensor) -> int:
    """Wide types first, so that every tensor starts at a multiple of its own size."""
    return tensor_bytes("", tensor.dtype, ())


def _copy(source: Path, target: Path) -> None:
    if target.exists() and target.read_bytes() == source.read_bytes():
        return
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.unfinished")
    shutil.copyfile(source, unfinished)
    os.replace(unfinished, target)
