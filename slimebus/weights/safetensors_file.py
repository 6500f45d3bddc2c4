"""Model directories: write a version so that any engine can load it, and read one without torch.

8 bytes: header length N, u64 little-endian | N bytes: JSON {name: {dtype, shape, data_offsets}} | the tensors' bytes
"""

import json
import operator
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slimebus.errors import WeightsError
from slimebus.weights.mapped_file import Access, map_file
from slimebus.weights.tensors import Tensor, Weights, hash_bytes, tensor_bytes, version_digest

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
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
    """The tensors of a safetensors file, or of a directory with one or with shards and their index. Memory-mapped, not to be written to.

    Raises WeightsError naming the file where it is missing or malformed.
    """
    tensors: dict[str, Tensor] = {}
    for file in _files(path):
        for name, tensor in read_file(file, access):
            if name in tensors:
                raise WeightsError(f"{file}: tensor {name!r} is in another file of {path} too", retryable=False)
            tensors[name] = tensor
    if lacking := sorted(_indexed(path) - tensors.keys()):
        raise WeightsError(f"{path}: its index names {len(lacking)} tensors that no shard has, such as {lacking[0]!r}", retryable=False)
    return tensors


def _indexed(path: Path) -> set[str]:
    """The tensors that the index of a directory of shards names."""
    if path.is_file() or (path / WEIGHTS_FILE).is_file():
        return set()
    return set(json.loads((path / INDEX_FILE).read_text())["weight_map"])


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


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    index, single = path / INDEX_FILE, path / WEIGHTS_FILE
    if single.is_file():
        return [single]
    if not index.is_file():
        raise WeightsError(f"{path} has neither {WEIGHTS_FILE} nor {INDEX_FILE}; is it a Hugging Face model directory?", retryable=False)
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as bad:
        raise WeightsError(f"{index}: expected a JSON object with a weight_map: {bad!r}", retryable=False) from None
    files = [path / name for name in names if isinstance(name, str) and Path(name).name == name]
    missing = [name for name in names if not (path / str(name)).is_file()]
    if missing or len(files) != len(names):
        raise WeightsError(f"{index}: shards are missing or outside of {path}: {missing or names}", retryable=False)
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
