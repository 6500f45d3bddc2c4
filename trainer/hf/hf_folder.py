"""How a Hugging Face directory is written: each tensor to its span in a file as it comes, none kept.

    model.safetensors                                                          a model of up to SHARD_BYTES
    model-00001-of-00002.safetensors, ..., model.safetensors.index.json        a larger one

The sizes of all tensors are known before the first of them comes.
"""

import itertools
import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from huggingface_hub import split_state_dict_into_shards_factory

from slimebus.bus.errors import SlimebusError
from slimebus.config.model_folder import CONFIG, read_config
from slimebus.weights.host.safetensors_file import INDEX_FILE, copy_config
from slimebus.weights.tensors import DTYPE_BYTES, host_bytes, safetensors_header, tensor_bytes

SHARD_BYTES = 5_000_000_000
"""Most that one file has, as transformers wrote them for long."""
FILE_PATTERN = "model{suffix}.safetensors"
MTP_LAYERS = "num_nextn_predict_layers"


class HfTensor(msgspec.Struct, frozen=True):
    """A Hugging Face tensor, and the global rank that holds it whole; dtype: torch's name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    rank: int = 0

    @property
    def size_bytes(self) -> int:
        """Of all its values."""
        return tensor_bytes(self.name, self.dtype, self.shape)


class FileSpan(NamedTuple):
    """Where the bytes of a tensor go."""

    file: str
    offset: int
    size_bytes: int


def write_folder(
    folder: str | Path,
    plan: Sequence[HfTensor],
    tensors: Iterable[tuple[str, Any]],
    *,
    source: str | Path,
    dtype: str,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """A model directory that transformers reloads: the planned `tensors`, in any order, and the small files of `source`.

    RankReport beside `folder` and renamed, so a reader never sees half of it; what was there is replaced.
    """
    target = Path(folder)
    building = target.with_name(target.name + ".part")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    copy_config(Path(source), building)
    write_shards(building, plan, tensors, shard_bytes)
    (building / CONFIG).write_text(json.dumps(exported_config(Path(source), dtype), indent=2))
    shutil.rmtree(target, ignore_errors=True)
    building.rename(target)


def exported_config(source: Path, dtype: str) -> dict[str, Any]:
    """The source's config.json with what the exported weights have: their dtype, and no layers of multi-token prediction."""
    config = {key: value for key, value in read_config(source).items() if key != "torch_dtype"} | {"dtype": dtype}
    return config | ({MTP_LAYERS: 0} if MTP_LAYERS in config else {})


def write_shards(folder: Path, plan: Sequence[HfTensor], tensors: Iterable[tuple[str, Any]], shard_bytes: int) -> None:
    """Write the safetensors files of a model, each of at most `shard_bytes` or one tensor, and their index where there are several. Raises
    SlimebusError when a tensor did not come."""
    planned = {tensor.name: tensor for tensor in plan}
    split = split_state_dict_into_shards_factory(
        planned, get_storage_size=lambda tensor: tensor.size_bytes, filename_pattern=FILE_PATTERN, max_shard_size=shard_bytes
    )
    spans: dict[str, FileSpan] = {}
    for file, names in split.filename_to_tensors.items():
        spans |= begin_file(folder / file, [planned[name] for name in names])
    missing = set(spans)
    for name, tensor in tensors:
        write_tensor(folder, spans[name], tensor)
        missing.remove(name)
    if missing:
        raise SlimebusError(f"{folder}: {len(missing)} tensors of the model were not exported, such as {min(missing)}")
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2))


def begin_file(path: Path, shard: Sequence[HfTensor]) -> dict[str, FileSpan]:
    """Write a file's header and give it its size; where each of its tensors goes. Wider numbers come first, so that all are aligned."""
    ordered = sorted(shard, key=lambda planned: (-DTYPE_BYTES[planned.dtype], planned.name))
    header = safetensors_header((planned.name, planned.dtype, planned.shape) for planned in ordered)
    *starts, end = itertools.accumulate((planned.size_bytes for planned in ordered), initial=len(header))
    with path.open("wb") as file:
        file.write(header)
        file.truncate(end)
    return {planned.name: FileSpan(path.name, at, planned.size_bytes) for planned, at in zip(ordered, starts, strict=True)}


def write_tensor(folder: Path, span: FileSpan, tensor: Any) -> None:
    """Write a torch tensor's bytes to their span. Raises SlimebusError when it is not as large as was planned."""
    values = host_bytes(tensor)
    if values.nbytes != span.size_bytes:
        raise SlimebusError(f"{folder}: a tensor of {values.nbytes} bytes came where {span.size_bytes} were planned")
    with (folder / span.file).open("r+b") as file:
        file.seek(span.offset)
        file.write(values.data)
