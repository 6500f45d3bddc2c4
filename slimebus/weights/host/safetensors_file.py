"""Safetensors files and model directories, written and read without torch."""

import dataclasses
import errno
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file

from slimebus.atomic_file import replacing
from slimebus.bus.errors import FatalWeightsError
from slimebus.weights.host.tensor_file import Access, map_file
from slimebus.weights.tensors import SAFETENSORS_DTYPES, Tensor, Weights, digest_of, hash_bytes, tensor_bytes

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
READABLE = 0o644
"""safetensors makes its files for their owner alone."""
SHARD = re.compile(r"(.*)-[0-9]+-of-([0-9]{1,9})\.safetensors")
NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".index.json")


def copy_config(model: Path, directory: Path) -> None:
    """Put all files of a model beside its weights into `directory`."""
    for file in sorted(model.iterdir()):
        if file.is_file() and not file.name.endswith(NOT_COPIED):
            with replacing(directory / file.name, sync=False) as out:
                out.write(file.read_bytes())


def write_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Replace one safetensors file. Raises OSError."""
    specs = {
        name: TensorSpec(dtype=t.dtype, shape=list(t.shape), data_ptr=t.buffer.ctypes.data, data_len=len(t.buffer))
        for name, t in tensors.items()
    }
    with replacing(path, sync=False) as out:
        try:
            serialize_file(specs, out.name, {"format": "pt"})
        except SafetensorError as bad:
            raise OSError(errno.EIO, str(bad), str(path)) from None
        os.chmod(out.name, READABLE)


def read_model(path: Path, access: Access = "read") -> dict[str, Tensor]:
    """The tensors of a safetensors file or of a directory's: model.safetensors, else the shards of the index, else every .safetensors file.

    Memory-mapped, not to be written to. Raises WeightsError naming the file where one is missing, malformed or not what the index says.
    """
    tensors: dict[str, Tensor] = {}
    for file, promised in _files(path).items():
        found = dict(read_file(file, access))
        if twice := sorted(tensors.keys() & found.keys()):
            raise FatalWeightsError(f"{file}: tensor {twice[0]!r} is in another file of {path} too")
        tensors |= found
        if lacking := sorted(promised - found.keys()):
            raise FatalWeightsError(f"{file}: {len(lacking)} tensors that {INDEX_FILE} says are in it are not, such as {lacking[0]!r}")
    return tensors


def as_weights(tensors: Mapping[str, Tensor], *, lineage: str = "", version: int = 0) -> Weights:
    """Tensors as a version, hashed."""
    hashed = Weights(lineage, version, "", tensors, {name: hash_bytes(tensor.buffer) for name, tensor in tensors.items()})
    return dataclasses.replace(hashed, digest=digest_of(hashed.forms))


def read_file(path: Path, access: Access = "read") -> Iterator[tuple[str, Tensor]]:
    """The tensors of one file, mapped.

    The safetensors package checks the header. It gives copies only, and numpy no bfloat16, so the bytes are mapped here: they lie
    without gaps, in the order of their offsets.
    """
    try:
        with safe_open(path, "numpy") as file:
            forms = [(name, file.get_slice(name).get_dtype(), tuple(file.get_slice(name).get_shape())) for name in file.offset_keys()]
    except SafetensorError as bad:
        raise FatalWeightsError(f"{path}: not a whole safetensors file: {bad}") from None
    with path.open("rb") as opened:
        at = 8 + int.from_bytes(opened.read(8), "little")
        data = map_file(opened.fileno(), os.fstat(opened.fileno()).st_size, access, at_once=access == "private")
    for name, code, shape in forms:
        dtype = SAFETENSORS_DTYPES.get(code, code)
        end = at + tensor_bytes(name, dtype, shape)
        yield name, Tensor(dtype, shape, data[at:end])
        at = end


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
        raise FatalWeightsError(f"{index}: expected a JSON object with a weight_map: {bad!r}") from None
    if missing := sorted(str(file) for file in files if file.parent != path or not file.is_file()):
        raise FatalWeightsError(f"{index}: shards are missing or outside of {path}: {', '.join(missing)}")
    return files


def _without_index(path: Path) -> list[Path]:
    """Every .safetensors file of a directory. Raises WeightsError where there is none, or where their names say that some are missing."""
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise FatalWeightsError(f"{path} has no .safetensors file; is it a Hugging Face model directory?")
    shards = Counter((found[1], int(found[2])) for file in files if (found := SHARD.fullmatch(file.name)))
    for (name, total), count in shards.items():
        if count != total:
            raise FatalWeightsError(f"{path}: {count} of the {total} shards of {name} are there, and no {INDEX_FILE}")
    return files
