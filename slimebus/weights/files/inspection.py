"""What lies at a path: the tensors of a model or of a delta file, the versions of a chain; whether every byte is right;
and what changed between two versions: how many values, by how much, in which layers, and what each codec makes of it.
"""

import contextlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from slimebus.bus.errors import FatalWeightsError, WeightsError
from slimebus.cli.formatting import columns
from slimebus.weights.codec import delta_codec
from slimebus.weights.codec.rounding import rounded
from slimebus.weights.files import delta_file, disk_chain
from slimebus.weights.files.safetensors_file import as_weights, read_model
from slimebus.weights.messages import DELTA, SAME
from slimebus.weights.tensors import DTYPE_BYTES, NO_BASE, STEPPED_DTYPES, Tensor, TensorForm, Weights, checksum, hash_bytes


def is_chain(path: Path) -> bool:
    """True for the folder of a lineage."""
    return path.is_dir() and ((path / disk_chain.LATEST).is_file() or bool(disk_chain.part_files(path)))


def _is_file(path: Path) -> bool:
    """True for what leads to a version, or is one: by its name or by how it begins."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return path.suffix in (".delta", ".full") or file.read(len(delta_file.MAGIC)) == delta_file.MAGIC


def read(path: Path) -> Mapping[str, Tensor]:
    """The tensors of a model, of a .full file, or of the newest version of a chain. Raises WeightsError and OSError."""
    if is_chain(path):
        return disk_chain.DiskPuller(path).pull(None, 1.0).tensors
    if not _is_file(path):
        return read_model(path)
    found = delta_file.read(path)
    if found.manifest.base != NO_BASE:
        raise FatalWeightsError(
            f"{path} is a delta to version {found.manifest.version}: it has what changed and no model; expected a model directory, "
            "a .full file or a lineage's folder. `slimebus weights apply A DELTA OUT` makes a model of it"
        )
    return delta_file.apply(found, None).tensors


def rows_of(path: Path) -> list[dict[str, Any]]:
    """One row for each version of a chain, each tensor of a file or model. Raises WeightsError for anything else."""
    if is_chain(path):
        return list(_version_rows(path))
    if _is_file(path):
        return [
            {**_form_row(e.form), "kind": e.kind, "bytes": e.size, "changed": e.num_changed} for e in delta_file.read(path).manifest.tensors
        ]
    forms = sorted(as_weights(read_model(path)).forms, key=lambda form: natural(form.name))
    return [{**_form_row(form), "bytes": form.size} for form in forms]


def _form_row(form: TensorForm) -> dict[str, Any]:
    return {**form._asdict(), "shape": list(form.shape)}


def _version_rows(folder: Path) -> Iterator[dict[str, Any]]:
    for file in disk_chain.part_files(folder):
        with contextlib.suppress(FileNotFoundError):  # its trainer deletes what is old meanwhile
            size, manifest = file.stat().st_size, delta_file.read(file).manifest
            yield {
                "version": manifest.version,
                "file": file.name,
                "kind": file.suffix[1:],
                "lineage": manifest.lineage,
                "base": manifest.base,
                "bytes": size,
                "tensors": len(manifest.tensors),
                "changed": sum(entry.num_changed for entry in manifest.tensors),
                "digest": manifest.digest,
            }


def verify(path: Path, base: Mapping[str, Tensor] | None) -> tuple[str, list[str]]:
    """The digest of what lies there, and what is wrong with it, one line each; every byte is read. float32 counts as it is published."""
    try:
        if is_chain(path):
            return _verify_chain(path)
        if _is_file(path):
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
