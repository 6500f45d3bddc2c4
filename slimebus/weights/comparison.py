"""What changed between two versions: how many values, by how much, in which layers, and what each codec makes of it."""

import re
from collections import defaultdict
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from slimebus.weights import codec
from slimebus.weights.tensors import DTYPE_BYTES, STEPPED_DTYPES, Tensor, Weights

LAYER = re.compile(r"((?:[^.]+\.)*?[0-9]+)\.")
BOUNDS = (1, 2, 3, 8, 15, 64, 256, 1 << 16)
"""Steps are counted from each bound to below the next, in units in the last place."""
CHUNK_VALUES = 1 << 22
MAX_NAME = 42
"""So that a table fits 80 columns."""
MAX_LISTED = 20


def compare(base: Weights, target: Weights) -> dict[str, Any]:
    """Density, step histogram, bytes by codec and a row for each layer, of what leads from base to target.

    Only bfloat16 and float16 tensors have steps; of the others it is counted whether they are the same.
    """
    layers: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    steps, sizes = np.zeros(len(BOUNDS) - 1, np.int64), {"full": 0, "xor_zstd": 0, "steps": 0, "steps_zstd": 0}
    whole, forms = [], {}
    for name, new in target.tensors.items():
        old = base.tensors.get(name)
        changed, payload = _num_values(new), len(new.buffer)
        if old is not None and (old.dtype, old.shape) == (new.dtype, new.shape):
            changed, payload = _count(old, new, steps, sizes)
        else:
            whole.append(name)
            if old is not None:
                forms[name] = f"{_form(old)} -> {_form(new)}"
            _add(sizes, {codec_name: len(new.buffer) for codec_name in sizes})
        _add_row(layers[layer_of(name)], changed, _num_values(new), payload)
    changed, values, _ = (sum(row[i] for row in layers.values()) for i in range(3))
    return {
        "values": values,
        "changed": changed,
        "density": changed / max(1, values),
        "steps": {
            f"{low}" if high == low + 1 else f"{low}..{high - 1}": int(n) for low, high, n in zip(BOUNDS, BOUNDS[1:], steps, strict=False)
        },
        "bytes": sizes,
        "new_or_reshaped": whole,
        "forms": forms,
        "gone": sorted(base.tensors.keys() - target.tensors.keys()),
        "layers": {name: _row(*layers[name]) for name in sorted(layers, key=natural)},
    }


def _row(changed: int, values: int, payload: int) -> dict[str, Any]:
    return {"values": values, "changed": changed, "density": changed / max(1, values), "bytes": payload}


def natural(name: str) -> list[Any]:
    """Sorts layer 2 before layer 10."""
    return [int(part) if part.isdecimal() else part for part in re.split("([0-9]+)", name)]


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} {'x'.join(map(str, tensor.shape)) or 'scalar'}"


def layer_of(name: str) -> str:
    """`model.layers.3` of `model.layers.3.mlp.up_proj.weight`: up to the first number; the whole name where there is none."""
    found = LAYER.match(name)
    return found[1] if found else name


def _count(old: Tensor, new: Tensor, steps: NDArray[np.int64], sizes: dict[str, int]) -> tuple[int, int]:
    """Add one tensor to steps and sizes; its changed values, and the bytes of its delta with zstd. What is the same does not travel."""
    size = len(new.buffer)
    sizes["full"] += size
    changed = _count_steps(old, new, steps) if new.dtype in STEPPED_DTYPES else _count_values(old, new)
    if not changed:
        return 0, 0
    if new.dtype not in STEPPED_DTYPES:
        found = dict.fromkeys(("xor_zstd", "steps", "steps_zstd"), size)
    else:
        xor = zstandard.ZstdCompressor(level=1).compress(np.bitwise_xor(old.buffer, new.buffer).data)
        plain, packed = (len(codec.encode(old.steps, new.steps, zstd=zstd).payload) for zstd in (False, True))
        found = {"xor_zstd": min(len(xor), size), "steps": min(plain, size), "steps_zstd": min(packed, size)}
    _add(sizes, found)
    return changed, found["steps_zstd"]


def _count_steps(old: Tensor, new: Tensor, steps: NDArray[np.int64]) -> int:
    changed = 0
    for start in range(0, len(new.steps), CHUNK_VALUES):
        part = slice(start, start + CHUNK_VALUES)
        differences = (new.steps[part] - old.steps[part]).view(np.int16)
        moved = np.abs(differences[differences != 0].astype(np.int32))
        steps += np.histogram(moved, BOUNDS)[0]
        changed += len(moved)
    return changed


def _count_values(old: Tensor, new: Tensor) -> int:
    differs: NDArray[np.bool_] = (old.buffer != new.buffer).reshape(-1, DTYPE_BYTES[new.dtype])
    return int(differs.any(axis=1).sum())


def _add(total: dict[str, int], more: dict[str, int]) -> None:
    for name, value in more.items():
        total[name] += value


def _add_row(row: list[int], changed: int, values: int, payload: int) -> None:
    row[0] += changed
    row[1] += values
    row[2] += payload


def _num_values(tensor: Tensor) -> int:
    return len(tensor.buffer) // DTYPE_BYTES[tensor.dtype]


def lines(found: dict[str, Any]) -> list[str]:
    """A comparison for a person, in 80 columns."""
    full, total = max(1, found["bytes"]["full"]), sum(found["steps"].values())
    out = [f"{found['changed']} of {found['values']} values changed ({found['density']:.2%})"]
    if total:
        out += ["", "step (units in the last place)"]
        out += [f"  {name:<12} {count:>14}  {count / total:7.2%}" for name, count in found["steps"].items() if count]
    out += ["", "bytes by codec"]
    out += [f"  {name:<12} {size:>14}  {size / full:7.2%} of the model" for name, size in found["bytes"].items()]
    out += ["", f"  {'layer':<{MAX_NAME}} {'values':>12} {'changed':>8} {'bytes':>12}"]
    for name, row in found["layers"].items():
        out.append(f"  {_short(name):<{MAX_NAME}} {row['values']:>12} {row['density']:>8.2%} {row['bytes']:>12}")
    out += [""] if found["new_or_reshaped"] or found["gone"] else []
    out += _listed([f"new or reshaped: {name} {found['forms'].get(name, '')}".rstrip() for name in found["new_or_reshaped"]])
    out += _listed([f"gone: {name}" for name in found["gone"]])
    if any("float32" in form and "bfloat16" in form for form in found["forms"].values()):
        out += ["", "float32 and bfloat16 have no steps between them; --bf16 rounds both to bfloat16"]
    if "file" in found:
        out += ["", f"wrote {found['file']['path']}: {found['file']['bytes']} bytes"]
    return out


def _short(name: str) -> str:
    half = MAX_NAME // 2 - 1
    return name if len(name) <= MAX_NAME else f"{name[:half]}..{name[-half:]}"


def _listed(lines: list[str]) -> list[str]:
    more = len(lines) - MAX_LISTED
    return [*lines[:MAX_LISTED], f"and {more} more; --json names all"] if more > 0 else lines
