"""Model files are what the safetensors library writes and reads, and malformed ones are refused by name."""

import json
from pathlib import Path

import numpy as np
import pytest

from slimebus.bus.errors import WeightsError
from slimebus.weights.host.safetensors_file import as_weights, copy_config, read_model, write_file
from slimebus.weights.tensors import Tensor, as_tensor


@pytest.fixture
def tensors(model) -> dict[str, Tensor]:
    return {name: as_tensor(name, value) for name, value in model.items()}


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name][:2] == tensor[:2]
        assert np.array_equal(got[name].buffer, tensor.buffer)


def test_a_written_file_reads_back_and_others_can_read_it(tmp_path: Path, tensors):
    path = tmp_path / "model.safetensors"
    write_file(path, tensors)
    assert_same(read_model(tmp_path), tensors)
    weights = as_weights(read_model(path), version=3)
    assert (weights.version, weights.size_bytes) == (3, sum(len(t.buffer) for t in tensors.values()))
    assert oct(path.stat().st_mode & 0o777) == "0o644"


def test_all_of_a_model_but_its_weights_is_its_config(tmp_path: Path):
    for name in ("config.json", "model-00001-of-00001.safetensors", "pytorch_model.bin", "model.safetensors.index.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "out").mkdir()
    copy_config(tmp_path, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.json"]


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


def sharded(folder: Path, tensors: dict[str, Tensor], **changed: str) -> Path:
    """Two shards and an index. changed: names of its weight_map, each with a file that is not the tensor's."""
    folder.mkdir()
    names = list(tensors)
    shards = {"model-1.safetensors": names[:4], "model-2.safetensors": names[4:]}
    for file, part in shards.items():
        write_file(folder / file, {name: tensors[name] for name in part})
    weight_map = {name: file for file, part in shards.items() for name in part} | changed
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_shards_are_one_model_as_their_index_says(tmp_path: Path, tensors):
    made = sharded(tmp_path / "sharded", tensors)
    assert_same(read_model(made), tensors)
    for wrong, why in {
        sharded(tmp_path / "promised", tensors, other="model-1.safetensors"): "index.json says are in it are not, such as 'other'",
        sharded(tmp_path / "swapped", tensors, embed="model-2.safetensors"): "are not, such as 'embed'",
        sharded(tmp_path / "outside", tensors, other="../../etc/passwd"): "outside of",
    }.items():
        with pytest.raises(WeightsError, match=why):
            read_model(wrong)
    (made / "model-2.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"model-2\.safetensors"):
        read_model(made)
    (made / "model.safetensors.index.json").write_text("[1,")
    with pytest.raises(WeightsError, match="weight_map"):
        read_model(made)


def test_shards_without_an_index_are_one_model_when_none_is_missing(tmp_path: Path, tensors):
    for number, name in enumerate(tensors, start=1):
        write_file(tmp_path / f"model-{number:05d}-of-{len(tensors):05d}.safetensors", {name: tensors[name]})
    assert_same(read_model(tmp_path), tensors)
    next(tmp_path.iterdir()).unlink()
    with pytest.raises(WeightsError, match=f"{len(tensors) - 1} of the {len(tensors)} shards of model are there"):
        read_model(tmp_path)


def test_a_reader_keeps_the_old_model_while_a_new_one_is_written(tmp_path: Path, tensors):
    path = tmp_path / "model.safetensors"
    write_file(path, tensors)
    old = read_model(tmp_path)
    write_file(path, {"other": as_tensor("other", np.ones(3, np.float32))})
    assert_same(old, tensors)
    assert read_model(tmp_path).keys() == {"other"}
    assert list(tmp_path.iterdir()) == [path]


def described(*shapes: object, dtype: str = "U8", name: str = "a") -> str:
    """A header of one tensor or more, each of (shape, begin, end)."""
    rest = [f'"dtype":"{dtype}","shape":{shape},"data_offsets":[{at},{to}]' for shape, at, to in shapes]
    return ",".join(f'"{name}{i or ""}":{{{one}}}' for i, one in enumerate(rest))


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ("", "not a whole safetensors file"),
        ("nope", "not a whole safetensors file"),
        ("[]", "invalid JSON"),
        ("[" * 100_000, "invalid JSON"),
        ('{"a": 3}', "Error while deserializing"),
        ('{"a": ["U8"]}', "Error while deserializing"),
        (f"{{{described(([2], 0, 2))},{described(([2], 0, 2))}}}", "not fully covered"),
        (f"{{{described(([2], 0, 2), ([2], 1, 3))}}}", "invalid offset"),
        (f"{{{described(([2], 0, 2), ([1], 3, 4))}}}", "invalid offset"),
        (f"{{{described(([2], 0, 2))}}}", "not fully covered"),
        (f"{{{described(([1.5], 0, 2), dtype='BF16')}}}", "Error while deserializing"),
        (f"{{{described(([1], 0, 2), dtype='BF17')}}}", "Error while deserializing"),
        (f"{{{described(([-4], 0, 4))}}}", "integer `-4`"),
        (f"{{{described(('four', 0, 4))}}}", "invalid JSON"),
        (f"{{{described(([4], 4, 0))}}}", "Error while deserializing"),
        (f"{{{described(([4], -8, 0))}}}", "Error while deserializing"),
        (f"{{{described(([4], 0, 99))}}}", "Error while deserializing"),
        (f"{{{described(([9223372036854775807] * 40, 0, 4))}}}", "overflow"),
        (f"{{{described(([4], 0, 4), name=chr(92) + 'ud800')}}}", "invalid JSON"),
        (f"{{{described(([4], 0, 4), name=chr(92) + 'n')}}}", "do not print"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: str, why: str):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + b"1234")
    with pytest.raises(WeightsError, match=why):
        read_model(path)


@pytest.mark.parametrize("damaged", [b"", b"\x00" * 7, (2**60).to_bytes(8, "little") + b"{}"])
def test_a_file_without_its_header_is_refused(tmp_path: Path, damaged: bytes):
    (tmp_path / "bad.safetensors").write_bytes(damaged)
    with pytest.raises(WeightsError, match=r"bad\.safetensors: not a whole safetensors file"):
        read_model(tmp_path / "bad.safetensors")


def test_a_directory_without_weights_is_named(tmp_path: Path):
    with pytest.raises(WeightsError, match=r"has no \.safetensors file"):
        read_model(tmp_path)
