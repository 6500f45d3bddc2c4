"""Exported directories: files of bounded size, written tensor by tensor."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slimebus.bus.errors import SlimebusError
from slimebus.weights.host.safetensors_file import read_model
from trainer.hf.hf_folder import HfTensor, write_folder, write_shards

TENSORS = {
    "b": torch.arange(6.0).view(2, 3),
    "odd": torch.tensor([1.5], dtype=torch.bfloat16),
    "a": torch.arange(8.0)[::2],
    "half": torch.ones(3, 5, dtype=torch.bfloat16),
}


def plan_of(tensors):
    return [HfTensor(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors.items()]


@pytest.fixture
def source(tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text('{"model_type": "llama", "torch_dtype": "bfloat16"}')
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    (tmp_path / "source" / "model-00001-of-00002.safetensors").write_bytes(b"weights")
    return tmp_path / "source"


@pytest.mark.parametrize(("shard_bytes", "files"), [(10**9, 1), (40, 3)])
def test_tensors_come_back_from_any_number_of_files(shard_bytes, files, source, tmp_path):
    out = tmp_path / "out"
    write_folder(out, plan_of(TENSORS), reversed(TENSORS.items()), source=source, dtype="float32", shard_bytes=shard_bytes)
    written = sorted(out.glob("*.safetensors"))
    assert len(written) == files
    loaded = {name: tensor for file in written for name, tensor in load_file(file).items()}
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[name], TENSORS[name]) for name in TENSORS)
    assert read_model(out).keys() == TENSORS.keys()
    assert json.loads((out / "config.json").read_text()) == {"model_type": "llama", "dtype": "float32"}
    assert (out / "tokenizer.json").exists()
    assert (out / "model.safetensors.index.json").exists() == (files > 1)


def test_no_file_is_larger_than_it_may_be_but_for_one_tensor(tmp_path):
    tensors = {str(i): torch.zeros(size) for i, size in enumerate([5, 5, 100, 1, 4, 5])}
    write_shards(tmp_path, plan_of(tensors), tensors.items(), 40)
    sizes = [sorted(tensor.nbytes for tensor in load_file(file).values()) for file in tmp_path.glob("*.safetensors")]
    assert sorted(sizes) == [[4, 16, 20], [20, 20], [400]]


def test_an_export_that_ends_early_leaves_what_was_there(source, tmp_path):
    out = tmp_path / "out"
    write_folder(out, plan_of(TENSORS), TENSORS.items(), source=source, dtype="float32")
    with pytest.raises(SlimebusError, match="1 tensors of the model were not exported, such as half"):
        write_folder(out, plan_of(TENSORS), list(TENSORS.items())[:-1], source=source, dtype="float32")
    assert load_file(out / "model.safetensors").keys() == TENSORS.keys()


def test_a_tensor_of_another_size_than_planned_is_refused(source, tmp_path):
    wrong = TENSORS | {"b": torch.zeros(2, 2)}
    with pytest.raises(SlimebusError, match="16 bytes came where 24 were planned"):
        write_folder(tmp_path / "out", plan_of(TENSORS), wrong.items(), source=source, dtype="float32")


def test_transformers_loads_a_model_of_several_files(untied_model, build_policy, tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.model.policy.SHARD_BYTES", 10_000)
    policy = build_policy(untied_model)
    policy.save_hf(str(tmp_path / "out"))
    assert len(list((tmp_path / "out").glob("model-0000*-of-*.safetensors"))) > 3
    loaded, want = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict(), load_file(untied_model / "model.safetensors")
    assert all(torch.equal(loaded[name], want[name]) for name in want)
