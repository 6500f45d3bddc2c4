"""Manifests that lie, in files and over the wire: an error that names what is wrong, no file elsewhere, no memory for what is claimed."""

import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash

from slimebus.errors import WeightsError
from slimebus.weights import delta_file
from slimebus.weights.messages import Manifest, TensorEntry
from slimebus.weights.puller import WeightPuller
from slimebus.weights.safetensors_file import as_weights
from slimebus.weights.server import WeightServer
from slimebus.weights.store import VersionStore
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
    "another hash": {"hash": "0" * 32},
    "no hash": {"hash": ""},
    "a delta from nothing": {"kind": "delta"},
    "the same as nothing": {"kind": "same"},
    "a name with a line break": {"name": "w\n"},
    "a name of two": {"name": "w", "more": [GOOD]},
    "text for a number": {"size": "16"},
    "a number for a name": {"name": 16},
    "a shape of fractions": {"shape": [8.5]},
    "a shape of text": {"shape": "8"},
}


def manifest_bytes(lie: dict[str, Any]) -> bytes:
    more = lie.get("more", [])
    entry = GOOD | {key: value for key, value in lie.items() if key != "more"}
    return msgspec.msgpack.encode({"lineage": "L", "version": 0, "digest": "0" * 32, "tensors": [entry, *more]})


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
    delta_file.write(folder / "x.delta", *delta_file.between(base, target))
    made = delta_file.apply(delta_file.read(folder / "x.delta"), base)
    assert made.tensors.keys() == {name}
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["inside", "x.delta"]


class Lying:
    """A store whose manifests say something else."""

    def __init__(self, lie: dict[str, Any]) -> None:
        self._store, self._lie = VersionStore(lineage="L"), lie
        self._store.publish({"w": VALUES})
        self.read = self._store.read

    def manifest(self, lineage: str, version: int, want: int = -1) -> Any:
        """What is encoded as it stands; the server asks it for no more than these."""
        good = self._store.manifest(lineage, version, want)
        more = [msgspec.convert(entry, TensorEntry) for entry in self._lie.get("more", [])]
        changed = msgspec.structs.replace(good.tensors[0], **{k: v for k, v in self._lie.items() if k != "more"})
        return Manifest(lineage="L", version=0, digest=good.digest, tensors=[changed, *more])


@pytest.fixture
def pulled_from(request: pytest.FixtureRequest) -> Iterator[WeightPuller]:
    server = WeightServer(Lying(request.param))
    puller = WeightPuller([server.endpoint], stall_s=0.2)
    yield puller
    puller.close()
    server.close()


HARMLESS = ("a size below nothing", "a size beyond the file", "a delta from nothing", "the same as nothing")
"""Over the wire: who has no base asks for the whole tensor, and its form says how much that is."""


@pytest.mark.parametrize("pulled_from", [lie for what, lie in LIES.items() if what not in HARMLESS], indirect=True)
def test_a_publisher_whose_manifest_lies_is_not_believed(pulled_from: WeightPuller) -> None:
    tracemalloc.start()
    with pytest.raises(WeightsError):
        pulled_from.pull(deadline_s=0.7)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


@pytest.mark.parametrize("pulled_from", [LIES[what] for what in HARMLESS], indirect=True)
def test_a_lie_that_nothing_rests_on_does_no_harm(pulled_from: WeightPuller) -> None:
    assert pulled_from.pull(deadline_s=5.0).tensors["w"].buffer.tobytes() == VALUES.tobytes()
