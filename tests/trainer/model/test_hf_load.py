"""Loading: sharded files, what a checkpoint lacks, and what of it a rank reads."""

import json
import re

import pytest
import torch
from model_families import save_case
from safetensors.torch import load_file, save_file

from slimebus.bus.errors import ConfigError


@pytest.fixture
def llama(tmp_path):
    save_case(tmp_path, "llama")
    return tmp_path


def change(folder, changes, *, without=()):
    """Write the weights anew with some of them changed, added or left out."""
    tensors = load_file(folder / "model.safetensors") | changes
    kept = {name: tensor for name, tensor in tensors.items() if name not in without}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def refused(build_policy, folder, message):
    with pytest.raises(ConfigError, match=message):
        build_policy(folder)


def test_shards_are_loaded_and_a_missing_one_is_named(tmp_path, build_policy):
    whole, shards = tmp_path / "whole", tmp_path / "shards"
    save_case(whole, "glm4_moe")
    save_case(shards, "glm4_moe", max_shard_size="100KB")
    files = sorted(shards.glob("*.safetensors"))
    assert len(files) > 3
    want, got = load_file(whole / "model.safetensors"), dict(build_policy(shards).export.tensors())
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want)
    files[1].unlink()
    refused(build_policy, shards, f"shards are missing.*{files[1].name}")


def test_a_tensor_that_the_index_promises_is_missed(tmp_path, build_policy):
    save_case(tmp_path, "llama", max_shard_size="100KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    file = index["weight_map"]["model.norm.weight"]
    kept = {name: tensor for name, tensor in load_file(tmp_path / file).items() if name != "model.norm.weight"}
    save_file(kept, tmp_path / file, metadata={"format": "pt"})
    refused(build_policy, tmp_path, f"{file}: 1 tensors that .* says are in it are not, such as 'model.norm.weight'")


def test_a_missing_tensor_is_named(llama, build_policy):
    change(llama, {}, without=["model.layers.1.mlp.up_proj.weight"])
    refused(build_policy, llama, "no tensor model.layers.1.mlp.up_proj.weight")


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.k_proj.weight", "model.embed_tokens.weight", "model.norm.weight"])
def test_a_tensor_of_another_shape_is_named_with_both_shapes(name, llama, build_policy):
    shape = list(load_file(llama / "model.safetensors")[name].shape)
    larger = [shape[0] + 2, *shape[1:]]
    change(llama, {name: torch.zeros(larger)})
    refused(build_policy, llama, re.escape(f"{name} has shape {larger}, its config.json says {shape}"))


def test_a_tensor_without_a_place_in_the_model_is_refused(llama, build_policy):
    change(llama, {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})
    refused(build_policy, llama, "1 tensors have no place in the model: model.layers.0.self_attn.q_proj.bias")


def test_weights_that_are_no_plain_numbers_are_refused(llama, build_policy):
    name = "model.layers.0.mlp.up_proj.weight"
    change(llama, {name: torch.zeros(96, 64).to(torch.float8_e4m3fn)})
    refused(build_policy, llama, f"{name} is float8_e4m3fn; quantised weights are not loaded")


def test_what_files_hold_beside_the_model_is_left_out(llama, build_policy, caplog):
    """Rotary frequencies of old files, and layers of multi-token prediction: those are not exported, so config.json promises none."""
    mtp = {"model.layers.2.eh_proj.weight": torch.zeros(64, 128), "model.layers.2.input_layernorm.weight": torch.zeros(64)}
    change(llama, mtp | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    config = json.loads((llama / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (llama / "config.json").write_text(json.dumps(config))
    policy = build_policy(llama)
    assert "2 tensors of layers from 2 on (multi-token prediction) are not loaded" in caplog.text
    policy.save_hf(str(llama / "out"))
    assert json.loads((llama / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    assert not mtp.keys() & load_file(llama / "out" / "model.safetensors").keys()


def test_an_output_layer_beside_tied_embeddings_is_not_read(tmp_path, build_policy):
    """Some files of tied models have it: a copy."""
    save_case(tmp_path, "qwen3")
    change(tmp_path, {"lm_head.weight": torch.full((131, 64), torch.nan)})
    assert all(tensor.isfinite().all() for _, tensor in build_policy(tmp_path).export.tensors())


def test_an_output_layer_that_is_missing_is_missed(llama, build_policy):
    change(llama, {}, without=["lm_head.weight"])
    refused(build_policy, llama, "no tensor lm_head.weight")
