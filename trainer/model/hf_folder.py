"""How a Hugging Face directory is written: each tensor to its span in a file as it comes, none kept.

    model.safetensors                                                          a model of up to SHARD_BYTES
    model-00001-of-00002.safetensors, ..., model.safetensors.index.json        a larger one

    0          8                       N
    +----------+-----------------------+--------------------------
    | N, u64   | JSON, then spaces     | tensors, without gaps
    +----------+-----------------------+--------------------------

The sizes of all tensors are known before the first of them comes.
"""

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slimebus.bus.errors import SlimebusError
from slimebus.model_folder import CONFIG, read_config
from slimebus.weights.files.safetensors_file import INDEX_FILE, WEIGHTS_FILE, copy_config
from slimebus.weights.tensors import DTYPE_BYTES, SAFETENSORS_CODES, tensor_bytes

SHARD_BYTES = 5_000_000_000
"""Most that one file has, as transformers wrote them for long."""
ALIGNMENT = 8
"""Of the first tensor, as the safetensors package has it."""
MTP_LAYERS = "num_nextn_predict_layers"


class Planned(NamedTuple):
    """A tensor that will come. dtype: torch's name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return tensor_bytes(self.name, self.dtype, self.shape)


class FileSpan(NamedTuple):
    """Where the bytes of a tensor go."""

    file: str
    offset: int
    size_bytes: int


def write_folder(
    folder: str | Path,
    plan: Sequence[Planned],
    tensors: Iterable[tuple[str, Any]],
    *,
    source: str | Path,
    dtype: str,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """A model directory that transformers reloads: the planned `tensors`, in any order, and the small files of `source`.

    Written beside `folder` and renamed, so a reader never sees half of it; what was there is replaced.
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


def write_shards(folder: Path, plan: Sequence[Planned], tensors: Iterable[tuple[str, Any]], shard_bytes: int) -> None:
    """Write the safetensors files of a model, and their index where there are several. Raises SlimebusError when a tensor did not come."""
    shards = list(shards_of(plan, shard_bytes))
    spans: dict[str, FileSpan] = {}
    for number, shard in enumerate(shards, 1):
        file = WEIGHTS_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        spans |= begin_file(folder / file, shard)
    missing = set(spans)
    for name, tensor in tensors:
        write_tensor(folder, spans[name], tensor)
        missing.remove(name)
    if missing:
        raise SlimebusError(f"{folder}: {len(missing)} tensors of the model were not exported, such as {min(missing)}")
    if len(shards) > 1:
        total = sum(span.size_bytes for span in spans.values())
        index = {"metadata": {"total_size": total}, "weight_map": {name: span.file for name, span in spans.items()}}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2))


def shards_of(plan: Sequence[Planned], shard_bytes: int) -> Iterator[list[Planned]]:
    """The plan cut into files of at most `shard_bytes`; a larger tensor has one of its own."""
    shard, size = list[Planned](), 0
    for planned in plan:
        if shard and size + planned.size_bytes > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(planned)
        size += planned.size_bytes
    yield shard


def begin_file(path: Path, shard: Sequence[Planned]) -> dict[str, FileSpan]:
    """Write a file's header and give it its size; where each of its tensors goes. Wider numbers come first, so that all are aligned."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in sorted(shard, key=lambda planned: (-DTYPE_BYTES[planned.dtype], planned.name)):
        start, end = end, end + tensor_bytes(name, dtype, shape)
        header[name] = {"dtype": SAFETENSORS_CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        first = file.tell()
        file.truncate(first + end)
    return {planned.name: FileSpan(path.name, first + header[planned.name]["data_offsets"][0], planned.size_bytes) for planned in shard}


def write_tensor(folder: Path, span: FileSpan, tensor: Any) -> None:
    """Write a torch tensor's bytes to their span. Raises SlimebusError when it is not as large as was planned."""
    import torch

    values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    if values.nbytes != span.size_bytes:
        raise SlimebusError(f"{folder}: a tensor of {values.nbytes} bytes came where {span.size_bytes} were planned")
    with (folder / span.file).open("r+b") as file:
        file.seek(span.offset)
        file.write(values.data)
