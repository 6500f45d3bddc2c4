"""What changed between two versions: how many values, by how much, in which layers, and what each codec makes of it."""

import re
from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from slimebus.cli.formatting import columns
from slimebus.weights.codec import delta_codec
from slimebus.weights.tensors import DTYPE_BYTES, STEPPED_DTYPES, Tensor, Weights

LAYER = re.compile(r"((?:[^.]+\.)*?[0-9]+)\.")
BOUNDS = (1, 2, 3, 8, 15, 64, 256, 1 << 16)
"""Steps are counted from each bound to below the next, in units in the last place."""
STEP_NAMES = [f"{low}" if high == low + 1 else f"{low}..{high - 1}" for low, high in pairwise(BOUNDS)]
CODECS = ("full", "xor_zstd", "steps", "steps_zstd")
CHUNK_VALUES = 1 << 22
MAX_NAME = 42
"""So that a table fits 80 columns."""
MAX_LISTED = 20


def compare(base: Weights, target: Weights) -> dict[str, Any]:
    """Density, step histogram, bytes by codec and a row for each layer, of what leads from base to target.

    Only bfloat16 and float16 tensors have steps; of the others it is counted whether they are the same.
    """
    before = {form.name: form for form in base.forms}
    steps, sizes = np.zeros(len(STEP_NAMES), np.int64), Counter(dict.fromkeys(CODECS, 0))
    layers: dict[str, Counter[str]] = defaultdict(Counter)
    whole, forms = [], {}
    for form in target.forms:
        old, new = before.get(form.name), target.tensors[form.name]
        changed, found = form.num_values, dict.fromkeys(CODECS, form.size)
        if old is not None and old._replace(hash=form.hash) == form:
            changed, moved, found = _measure(base.tensors[form.name], new)
            steps += moved
        else:
            whole.append(form.name)
            if old is not None:
                forms[form.name] = f"{old.kind} -> {form.kind}"
        sizes.update(found)
        layers[layer_of(form.name)].update(values=form.num_values, changed=changed, bytes=found["steps_zstd"])
    total = _row(sum(layers.values(), Counter()))
    return {
        **{name: total[name] for name in ("values", "changed", "density")},
        "steps": dict(zip(STEP_NAMES, steps.tolist(), strict=True)),
        "bytes": dict(sizes),
        "new_or_reshaped": whole,
        "forms": forms,
        "gone": sorted(base.tensors.keys() - target.tensors.keys()),
        "layers": {name: _row(layers[name]) for name in sorted(layers, key=natural)},
    }


def _row(count: Counter[str]) -> dict[str, Any]:
    density = count["changed"] / max(1, count["values"])
    return {"values": count["values"], "changed": count["changed"], "density": density, "bytes": count["bytes"]}


def natural(name: str) -> list[Any]:
    """Sorts layer 2 before layer 10."""
    return [int(part) if part.isdecimal() else part for part in re.split("([0-9]+)", name)]


def layer_of(name: str) -> str:
    """`model.layers.3` of `model.layers.3.mlp.up_proj.weight`: up to the first number; the whole name where there is none."""
    found = LAYER.match(name)
    return found[1] if found else name


def _measure(old: Tensor, new: Tensor) -> tuple[int, NDArray[np.int64], dict[str, int]]:
    """How many values changed between two tensors of one form, a histogram of their steps, and bytes by codec: 0 for what is the same."""
    size, steps = len(new.buffer), np.zeros(len(STEP_NAMES), np.int64)
    is_stepped = new.dtype in STEPPED_DTYPES
    if is_stepped:
        for start in range(0, new.num_values, CHUNK_VALUES):
            part = slice(start, start + CHUNK_VALUES)
            differences = (new.steps[part] - old.steps[part]).view(np.int16)
            steps += np.histogram(np.abs(differences.astype(np.int32)), BOUNDS)[0]
        changed = int(steps.sum())
    else:
        differs = (old.buffer != new.buffer).reshape(-1, DTYPE_BYTES[new.dtype])
        changed = int(np.count_nonzero(differs.any(axis=1)))
    if not changed or not is_stepped:
        return changed, steps, dict.fromkeys(CODECS, size if changed else 0) | {"full": size}
    xor = zstandard.ZstdCompressor(level=1).compress(np.bitwise_xor(old.buffer, new.buffer).data)
    plain, packed = (delta_codec.encode(old.steps, new.steps, zstd=zstd).payload for zstd in (False, True))
    sizes = {"full": size, "xor_zstd": len(xor), "steps": len(plain), "steps_zstd": len(packed)}
    return changed, steps, {name: min(size, bytes_) for name, bytes_ in sizes.items()}


def lines(found: dict[str, Any]) -> list[str]:
    """A comparison for a person, in 80 columns."""
    out = [f"{found['changed']} of {found['values']} values changed ({found['density']:.2%})"]
    out += _shares("step (units in the last place)", found["steps"], "of the changed", sum(found["steps"].values()))
    out += _shares("bytes by codec", found["bytes"], "of the model", found["bytes"]["full"])
    rows = [(_short(name), row["values"], f"{row['density']:.2%}", row["bytes"]) for name, row in found["layers"].items()]
    out += ["", *columns(rows, ("layer", "values", "changed", "bytes"))]
    out += [""] if found["new_or_reshaped"] or found["gone"] else []
    out += _listed([f"new or reshaped: {name} {found['forms'].get(name, '')}".rstrip() for name in found["new_or_reshaped"]])
    out += _listed([f"gone: {name}" for name in found["gone"]])
    if any("float32" in form and "bfloat16" in form for form in found["forms"].values()):
        out += ["", "float32 and bfloat16 have no steps between them; without --exact float32 is rounded"]
    if "file" in found:
        out += ["", f"wrote {found['file']['path']}: {found['file']['bytes']} bytes"]
    return out


def _shares(title: str, counts: dict[str, int], of: str, total: int) -> list[str]:
    """A table of what there is any of, each with its share of the total."""
    rows = [(name, count, f"{count / total:.2%}") for name, count in counts.items() if count]
    return ["", *columns(rows, (title, "", of))] if rows else []


def _short(name: str) -> str:
    half = MAX_NAME // 2 - 1
    return name if len(name) <= MAX_NAME else f"{name[:half]}..{name[-half:]}"


def _listed(lines: list[str]) -> list[str]:
    more = len(lines) - MAX_LISTED
    return [*lines[:MAX_LISTED], f"and {more} more; --json names all"] if more > 0 else lines
