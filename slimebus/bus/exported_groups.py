"""Groups as a folder of files that other tools can read: `slimebus buffer export` and the trainer's dumps write them.

groups.jsonl               one group a line: what became of it, its prompt, and the headers and fields of its samples
arrays-00000.safetensors   arrays named GROUP/SAMPLE/FIELD of the groups whose line names this file; bfloat16 as its 16 bits (uint16)
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from slimebus.bus.errors import DataError
from slimebus.bus.sample_table import CheckedGroup, SampleTable
from slimebus.bus.samples import decode_arrays
from slimebus.weights.files.safetensors_file import READABLE

GROUPS_FILE = "groups.jsonl"


def shard_name(number: int) -> str:
    """The file of the arrays of some groups."""
    return f"arrays-{number:05d}.safetensors"


def arrays_of(name: str, group: CheckedGroup) -> dict[str, np.ndarray]:
    """The arrays of a group by the names that they have in a file."""
    return {f"{name}/{i}/{field}": part for field, parts in decode_arrays(group).items() for i, part in enumerate(parts)}


def write_arrays(arrays: Mapping[str, np.ndarray], path: Path) -> None:
    """Write a file of arrays. Raises OSError."""
    from safetensors.numpy import save_file

    save_file(dict(arrays), path)
    path.chmod(READABLE)


def read_frames(path: Path, name: str, table: SampleTable) -> list[bytes]:
    """One frame for each field of a group, from the arrays of its samples. Raises DataError."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as arrays:
            names = [[f"{name}/{i}/{field.name}" for i in range(len(table.num_tokens))] for field in table.fields]
            return [b"".join(arrays.get_tensor(name).tobytes() for name in of_field) for of_field in names]
    except (SafetensorError, OSError) as bad:
        raise DataError(f"{path}: the arrays of group {name!r} cannot be read: {bad}") from None
