"""Manifests that lie, in files and over the wire: an error that names what is wrong, no file elsewhere, no memory for what is claimed."""

import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from changed_store import changed
from delta_files import between

from slimebus.bus.errors import WeightsError
from slimebus.weights.files import delta_file
from slimebus.weights.host.safetensors_file import as_weights
from slimebus.weights.messages import Manifest
from slimebus.weights.store.version_store import VersionStore
from slimebus.weights.tensors import as_tensor, hash_bytes

VALUES = np.arange(8, dtype=np.uint16)
GOOD: dict[str, Any] = {
    "name": "w", "dtype": "bfloat16", "shape": [8], "hash": hash_bytes(VALUES), "kind": "full", "size": 16,
}  # fmt: skip

LIES: dict[str, dict[str, Any]] = {
    "a size below nothing": {"size": -16},
    "a size beyond the file": {"size": 1 << 60},
    "a shape below nothing": {"shape": [-8]},
    "two shapes below nothing": {"shape": [-2, -4]},
    "an enormous shape": {"shape": [1 << 40, 1 << 40]},
    "a shape of which the product overflows": {"shape": [1 << 62, 4, 1 << 62]},
    "a shape of very many sizes": {"shape": [1] * 1000},
    "a shape that is another": {"shape": [9]},
    "a dtype that is none": {"dtype": "bfloat17"},
    "a dtype of another size": {"dtype": "float32"},
    "no dtype": {"dtype": ""},
    "another hash": {"hash": "0" * 64},
    "no hash": {"hash": ""},
    "a delta from nothing": {"kind": "delta"},
    "the same as nothing": {"kind": "same"},
    "a name with a line break": {"name": "w\n"},
    "a hash that is a path": {"hash": "../../../../tmp/" + "0" * 48},
    "a hash of capitals": {"hash": hash_bytes(VALUES).upper()},
    "a hash with a line break": {"hash": hash_bytes(VALUES) + "\n"},
    "a kind that is none": {"kind": "half"},
    "more changed than there is": {"num_changed": 1 << 40},
    "fewer than none changed": {"num_changed": -1},
    "a payload of what has none": {"kind": "same", "size": 16},
    "another digest": {"digest": "0" * 64},
    "a digest that is a path": {"digest": "../x"},
    "another lineage than a name": {"lineage": "../L"},
    "a version below nothing": {"version": -2},
    "a base that is newer": {"base": 7},
    "a name of two": {"name": "w", "more": [GOOD]},
    "text for a number": {"size": "16"},
    "a number for a name": {"name": 16},
    "a shape of fractions": {"shape": [8.5]},
    "a shape of text": {"shape": "8"},
}


MANIFEST_FIELDS = ("lineage", "version", "digest", "base")


def lying(lie: dict[str, Any]) -> dict[str, Any]:
    """A manifest of one tensor and with one lie; its digest is right, but where that is the lie."""
    entry = GOOD | {key: value for key, value in lie.items() if key not in (*MANIFEST_FIELDS, "more")}
    about = {key: value for key, value in lie.items() if key in MANIFEST_FIELDS}
    tensors = [entry, *lie.get("more", [])]
    lines = sorted(f"{t['name']} {t['dtype']} {','.join(map(str, t['shape']))} {t['hash']}\n" for t in tensors)
    return {"lineage": "L", "version": 0, "digest": hash_bytes("".join(lines).encode()), "tensors": tensors} | about


def manifest_bytes(lie: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode(lying(lie))


def written(path: Path, manifest: bytes, payload: bytes) -> Path:
    path.write_bytes(delta_file.MAGIC + len(manifest).to_bytes(8, "little") + xxhash.xxh3_128_digest(manifest) + manifest + payload)
    return path


@pytest.mark.parametrize("lie", LIES)
def test_a_file_whose_manifest_lies_is_refused(tmp_path: Path, lie: str) -> None:
    path = written(tmp_path / "x.delta", manifest_bytes(LIES[lie]), VALUES.tobytes())
    tracemalloc.start()
    with pytest.raises(WeightsError):
        delta_file.apply(delta_file.read(path), None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


def test_names_are_no_paths(tmp_path: Path) -> None:
    """A name with slashes is a name: nothing is written beside what was asked for."""
    name = "../../outside/../w"
    base, target = (as_weights({name: as_tensor(name, VALUES + np.uint16(n))}, lineage="L", version=n) for n in (0, 1))
    folder = tmp_path / "inside"
    folder.mkdir()
    delta_file.write(folder / "x.delta", *between(base, target))
    made = delta_file.apply(delta_file.read(folder / "x.delta"), base)
    assert made.tensors.keys() == {name}
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["inside", "x.delta"]


@pytest.mark.parametrize("lie", ["an enormous shape", "another digest", "another lineage than a name", "a payload of what has none"])
def test_a_publisher_whose_manifest_lies_is_not_believed(lie: str, puller_of: Any) -> None:
    """The check is the one of a file; here its manifest comes over the wire."""
    store = VersionStore(lineage="L")
    store.publish({"w": VALUES})
    wrong = msgspec.structs.replace(Manifest("L", 0, "", []), **{"base": -1} | lying(LIES[lie]))
    puller = puller_of(changed(store, lambda manifest: wrong), stall_s=0.2)
    tracemalloc.start()
    with pytest.raises(WeightsError):
        puller.pull(deadline_s=0.7)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


def test_a_delta_as_large_as_its_tensor_is_refused_for_that_reason(tmp_path: Path) -> None:
    entry = {"kind": "delta", "size": 16, "payload_hash": "0" * 32, "base_hash": "0" * 64, "base": 0, "version": 1}
    path = written(tmp_path / "x.delta", manifest_bytes(entry), bytes(16))
    with pytest.raises(WeightsError, match=r"tensor 'w', delta, of 16 bytes has a payload of 16 bytes; expected 1 to 15"):
        delta_file.read(path)
