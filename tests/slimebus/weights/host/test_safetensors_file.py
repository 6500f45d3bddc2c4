"""Model files are what the safetensors library writes and reads, and malformed ones are refused by name."""

import json
from pathlib import Path

import numpy as np
import pytest

from slimebus.bus.errors import WeightsError
from slimebus.weights.host.safetensors_file import as_weights, read_model, write_file, write_model
from slimebus.weights.tensors import Tensor, as_tensor


@pytest.fixture
def tensors(model) -> dict[str, Tensor]:
    return {name: as_tensor(name, value) for name, value in model.items()}


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name][:2] == tensor[:2]
        assert np.array_equal(got[name].buffer, tensor.buffer)


def test_a_written_model_reads_back_and_brings_its_config(tmp_path: Path, tensors):
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    (source / "model-00001-of-00001.safetensors").write_text("stays behind")
    write_model(tmp_path / "out", tensors, config_from=source)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert_same(read_model(tmp_path / "out"), tensors)
    weights = as_weights(read_model(tmp_path / "out"), version=3)
    write_model(tmp_path / "again", weights.tensors)
    assert_same(read_model(tmp_path / "again"), tensors)
    assert (weights.version, weights.size_bytes) == (3, sum(len(t.buffer) for t in tensors.values()))


def test_the_safetensors_library_agrees(tmp_path: Path, tensors):
    safetensors = pytest.importorskip("safetensors.numpy")
    write_file(tmp_path / "a.safetensors", tensors)
    from safetensors import safe_open

    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        assert set(file.keys()) == tensors.keys()
        assert file.get_tensor("embed").view(dtype=__import__("torch").int16).numpy().tobytes() == tensors["embed"].buffer.tobytes()
        assert file.get_tensor("scale").numpy().tobytes() == tensors["scale"].buffer.tobytes()
    safetensors.save_file({"x": np.arange(6, dtype=np.float32).reshape(2, 3)}, tmp_path / "b.safetensors")
    assert read_model(tmp_path / "b.safetensors")["x"].buffer.view(np.float32).tolist() == [0, 1, 2, 3, 4, 5]


def test_shards_are_read_through_their_index(tmp_path: Path, tensors):
    names = list(tensors)
    shards = {"model-1.safetensors": names[:4], "model-2.safetensors": names[4:]}
    for file, part in shards.items():
        write_file(tmp_path / file, {name: tensors[name] for name in part})
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_same(read_model(tmp_path), tensors)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"model-2\.safetensors"):
        read_model(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../etc/passwd"}}')
    with pytest.raises(WeightsError, match="outside"):
        read_model(tmp_path)


def test_a_reader_keeps_the_old_model_while_a_new_one_is_written(tmp_path: Path, tensors):
    write_model(tmp_path, tensors)
    old = read_model(tmp_path)
    write_model(tmp_path, {"other": as_tensor("other", np.ones(3, np.float32))})
    assert_same(old, tensors)
    assert read_model(tmp_path).keys() == {"other"}
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"\x00" * 7,
        (2**60).to_bytes(8, "little") + b"{}",
        (4).to_bytes(8, "little") + b"nope",
        (2).to_bytes(8, "little") + b"[]",
        *(
            len(text := json.dumps({"x": described}).encode()).to_bytes(8, "little") + text + bytes(8)
            for described in (
                {"dtype": "BF16", "shape": [5], "data_offsets": [0, 10]},
                {"dtype": "BF16", "shape": [4], "data_offsets": [-8, 0]},
                {"dtype": "BF16", "shape": [3], "data_offsets": [0, 8]},
                {"dtype": "BF16", "shape": [-4], "data_offsets": [0, 8]},
                {"dtype": "X9", "shape": [4], "data_offsets": [0, 8]},
                {"dtype": "BF16", "shape": "four", "data_offsets": [0, 8]},
                ["BF16"],
            )
        ),
    ],
)
def test_malformed_files_are_refused(tmp_path: Path, damaged: bytes):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(damaged)
    with pytest.raises(WeightsError, match=r"bad\.safetensors|tensor 'x'"):
        read_model(path)


def test_a_directory_without_weights_is_named(tmp_path: Path):
    with pytest.raises(WeightsError, match=r"has no \.safetensors file"):
        read_model(tmp_path)
