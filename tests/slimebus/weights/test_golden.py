"""Bytes of every released format stay readable. `python tests/slimebus/weights/test_golden.py` writes missing files, never others."""

from pathlib import Path

import numpy as np
import pytest
from delta_files import between

from slimebus.bus import envelope
from slimebus.weights import messages
from slimebus.weights.codec import delta_codec
from slimebus.weights.codec.kernel import Kernel, load_kernel
from slimebus.weights.files import delta_file
from slimebus.weights.host.safetensors_file import as_weights
from slimebus.weights.messages import Manifest, Piece, TensorEntry
from slimebus.weights.tensors import NO_BASE, Weights, as_tensor

GOLDEN = Path(__file__).parent / "golden"
NOTHING = Weights("5f1c", NO_BASE, "", {}, {})
FRACTIONS = {"sparse": 0.02, "dense": 0.6, "full": 1.0}
MESSAGES = {
    "manifest_request": messages.ManifestRequest(have_lineage="5f1c", have_version=41),
    "manifest_reply": messages.ManifestReply(lineage="5f1c", version=42),
    "chunk_request": messages.ChunkRequest(lineage="5f1c", version=42, pieces=[Piece("a", 41, 0, 100), Piece("b", NO_BASE, 8, 64)]),
    "chunk_reply": messages.ChunkReply(gone=[1]),
}
MANIFEST = Manifest(
    lineage="5f1c",
    version=42,
    digest="d" * 64,
    base=41,
    sources=["tcp://10.0.0.2:7000"],
    tensors=[
        TensorEntry(
            name="a",
            dtype="bfloat16",
            shape=(3, 5),
            hash="a" * 64,
            kind="delta",
            size=50,
            num_changed=2,
            payload_hash="b" * 32,
            base_hash="c" * 64,
        ),
        TensorEntry(name="b", dtype="float32", shape=(), hash="e" * 64, kind="full", size=4),
        TensorEntry(name="c", dtype="bfloat16", shape=(2,), hash="f" * 64, kind="same"),
    ],
)


def arrays(form: str) -> tuple[np.ndarray, np.ndarray]:
    """Made without a random generator, whose stream numpy may change."""
    base = (np.arange(3000, dtype=np.uint32) * 2654435761 >> 11).astype(np.uint16)
    noise = np.arange(3000, dtype=np.uint32) * 40503 >> 3 & 0xFFFF
    step = np.array([1, 0xFFFF, 2, 5, 0xFFF6, 100, 0x8000], np.uint16)[noise % 7]
    moves = noise if form == "full" else np.where(noise < FRACTIONS[form] * 65536, step, 0)
    return base, (base + moves).astype(np.uint16)


def payload_file(form: str, zstd: bool) -> Path:
    return GOLDEN / f"delta-format{delta_codec.FORMAT}-{form}{'-zstd' if zstd else ''}.bin"


@pytest.mark.parametrize("kernel", [Kernel(), load_kernel()], ids=["numpy", "loaded"])
@pytest.mark.parametrize("zstd", [False, True])
@pytest.mark.parametrize("form", FRACTIONS)
def test_a_stored_delta_still_leads_to_its_target(form: str, zstd: bool, kernel: Kernel) -> None:
    payload = payload_file(form, zstd).read_bytes()
    values, target = arrays(form)
    delta_codec.apply(payload, values, kernel=kernel)
    assert np.array_equal(values, target)
    assert (
        delta_codec.split_units(payload, len(values))[0].kind
        == {"full": delta_codec.FULL, "sparse": delta_codec.SPARSE, "dense": delta_codec.DENSE}[form]
    )


@pytest.mark.parametrize("form", FRACTIONS)
def test_raw_deltas_are_still_written_the_same(form: str) -> None:
    assert delta_codec.encode(*arrays(form), zstd=False).payload == payload_file(form, False).read_bytes()


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_are_still_read_and_written_the_same(name: str) -> None:
    stored = (GOLDEN / f"{name}.msgpack").read_bytes()
    assert envelope.decode([stored], messages.TYPES).message == MESSAGES[name]
    assert envelope.encode(MESSAGES[name], id=7, run="r", sender="s") == stored


def test_manifests_are_still_read_and_written_the_same() -> None:
    import msgspec

    stored = (GOLDEN / "manifest.msgpack").read_bytes()
    assert msgspec.msgpack.decode(stored, type=Manifest) == MANIFEST
    assert msgspec.msgpack.encode(MANIFEST) == stored


def chain_version(number: int) -> Weights:
    """A tensor of each form of change, one that travels whole, one that stays, a scalar and an empty one."""
    tensors = {f"layers.0.{form}": arrays(form)[number] for form in FRACTIONS}
    scale = np.arange(6, dtype=np.float32).reshape(2, 3) + np.float32(number)
    more = {
        "scale": scale,
        "fixed": arrays("sparse")[0],
        "scalar": np.array(0x3F80 + number, np.uint16),
        "empty": np.zeros((0, 4), np.uint16),
    }
    return as_weights({name: as_tensor(name, value) for name, value in (tensors | more).items()}, lineage="5f1c", version=number)


def test_stored_files_of_a_chain_still_lead_to_their_versions() -> None:
    whole = delta_file.apply(delta_file.read(GOLDEN / "chain.full"), None)
    stepped = delta_file.apply(delta_file.read(GOLDEN / "chain.delta"), whole)
    for got, number in ((whole, 0), (stepped, 1)):
        expected = chain_version(number)
        assert (got.lineage, got.version, got.digest, got.hashes) == ("5f1c", number, expected.digest, expected.hashes)
        for name, tensor in expected.tensors.items():
            assert np.array_equal(got.tensors[name].buffer, tensor.buffer)


def test_a_full_copy_is_still_written_the_same(tmp_path: Path) -> None:
    delta_file.write(tmp_path / "chain.full", *between(NOTHING, chain_version(0)))
    assert (tmp_path / "chain.full").read_bytes() == (GOLDEN / "chain.full").read_bytes()


def _write_missing() -> None:
    import msgspec

    GOLDEN.mkdir(exist_ok=True)
    chain = {"chain.full": (NOTHING, chain_version(0)), "chain.delta": (chain_version(0), chain_version(1))}
    for name, pair in chain.items():
        if not (GOLDEN / name).exists():
            delta_file.write(GOLDEN / name, *between(*pair))
    files = {payload_file(form, zstd): delta_codec.encode(*arrays(form), zstd=zstd).payload for form in FRACTIONS for zstd in (False, True)}
    files |= {GOLDEN / f"{name}.msgpack": envelope.encode(message, id=7, run="r", sender="s") for name, message in MESSAGES.items()}
    files[GOLDEN / "manifest.msgpack"] = msgspec.msgpack.encode(MANIFEST)
    for path, content in files.items():
        if not path.exists():
            path.write_bytes(content)


if __name__ == "__main__":
    _write_missing()
