"""What changed between two versions: how many values, by how much, in which layers, and what each codec makes of it."""

import re
from collections import defaultdict
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from slimebus.weights import codec
from slimebus.weights.tensors import DTYPE_BYTES, STEPPED_DTYPES, Tensor, Weights

LAYER = re.compile(r"^(.*?\.?layers?\.\d+)\.")
BOUNDS = (1, 2, 3, 8, 15, 64, 256, 1 << 16)
"""Steps are counted from each bound to below the next, in units in the last place."""


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
        "layers": {name: {"values": v, "changed": c, "density": c / max(1, v), "bytes": b} for name, (c, v, b) in layers.items()},
    }


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} {'x'.join(map(str, tensor.shape)) or 'scalar'}"


def layer_of(name: str) -> str:
    """`model.layers.3` of `model.layers.3.mlp.up_proj.weight`; the whole name where there is no layer in it."""
    found = LAYER.match(name)
    return found[1] if found else name


def _count(old: Tensor, new: Tensor, steps: NDArray[np.int64], sizes: dict[str, int]) -> tuple[int, int]:
    """Add one tensor to steps and sizes; its changed values, and the bytes of its delta with zstd."""
    size = len(new.buffer)
    if new.dtype not in STEPPED_DTYPES:
        width = DTYPE_BYTES[new.dtype]
        changed = int((old.buffer != new.buffer).reshape(-1, width).any(axis=1).sum()) if size else 0
        _add(sizes, {name: size if changed or name == "full" else 0 for name in sizes})
        return changed, size if changed else 0
    differences = np.abs((new.steps - old.steps).view(np.int16).astype(np.int32))
    steps += np.histogram(differences, BOUNDS)[0]
    xor = zstandard.ZstdCompressor(level=1).compress(np.bitwise_xor(old.buffer, new.buffer).data) if size else b""
    plain, packed = (len(codec.encode(old.steps, new.steps, zstd=zstd).payload) for zstd in (False, True))
    _add(sizes, {"full": size, "xor_zstd": len(xor), "steps": min(plain, size), "steps_zstd": min(packed, size)})
    return int(np.count_nonzero(differences)), min(packed, size)


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
    """A comparison for a person."""
    full = max(1, found["bytes"]["full"])
    total = max(1, sum(found["steps"].values()))
    out = [f"{found['changed']} of {found['values']} values changed ({found['density']:.2%})", "", "step (units in the last place)"]
    out += [f"  {name:<12} {count:>12}  {count / total:7.2%}" for name, count in found["steps"].items() if count]
    out += ["", "bytes by codec"]
    out += [f"  {name:<12} {size:>12}  {size / full:7.2%} of the model" for name, size in found["bytes"].items()]
    out += ["", f"  {'layer':<48} {'values':>12} {'changed':>8} {'bytes':>12}"]
    out += [f"  {name:<48} {row['values']:>12} {row['density']:>8.2%} {row['bytes']:>12}" for name, row in found["layers"].items()]
    out += [f"new or reshaped: {name} {found['forms'].get(name, '')}".rstrip() for name in found["new_or_reshaped"]]
    out += [f"gone: {name}" for name in found["gone"]]
    if any("float32" in form and "bfloat16" in form for form in found["forms"].values()):
        out += ["", "float32 and bfloat16 have no steps between them; --bf16 rounds both to bfloat16"]
    if "file" in found:
        out += ["", f"wrote {found['file']['path']}: {found['file']['bytes']} bytes"]
    return out
