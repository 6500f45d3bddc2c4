"""Reading a model directory: whole, or an error that names what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.engine.model_config import ModelConfig
from rollout.engine.weights import read_parameters
from slimebus.errors import ConfigError, WeightsError


@pytest.fixture
def tensors(qwen3, tmp_path: Path):
    """(config, tensors) of the model, to be saved again in tmp_path."""
    path, _ = qwen3
    return ModelConfig.read(path), load_file(path / "model.safetensors")


def test_bf16_is_read_as_float32_without_a_change(tensors, qwen3):
    config, saved = tensors
    read = read_parameters(qwen3[0], config, torch.float32)
    assert all(torch.equal(read[name], saved[name].float()) for name in read)


def test_shards_listed_by_an_index_are_read_together(tensors, tmp_path: Path):
    config, saved = tensors
    names = sorted(saved)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in shards.items():
        save_file({name: saved[name] for name in held}, tmp_path / file)
    weight_map = {name: file for file, held in shards.items() for name in held}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert sorted(read_parameters(tmp_path, config, torch.float32)) == names


def test_an_index_cannot_name_a_file_elsewhere(tensors, tmp_path: Path):
    config, _ = tensors
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../x.safetensors"}}))
    with pytest.raises(WeightsError, match="not a file of the same directory"):
        read_parameters(tmp_path, config, torch.float32)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.norm.weight"), "1 tensors are missing, the first is model.norm.weight"),
        (lambda t: t.update(extra=torch.zeros(1)), "tensor extra is not part of a Qwen3"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(3)}), r"model.norm.weight has shape \[3\], expected \[32\]"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(32, dtype=torch.int8)}), "quantised"),
    ],
)
def test_a_wrong_tensor_is_named(tensors, tmp_path: Path, change, words: str):
    config, saved = tensors
    change(saved)
    save_file(saved, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=words):
        read_parameters(tmp_path, config, torch.float32)


def test_a_torn_file_is_refused(tensors, qwen3, tmp_path: Path):
    config, _ = tensors
    whole = (qwen3[0] / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(WeightsError, match="could not be read as safetensors"):
        read_parameters(tmp_path, config, torch.float32)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architecture MambaForCausalLM"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn'"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
    ],
)
def test_a_model_that_is_not_served_is_named(qwen3, tmp_path: Path, change, words: str):
    config = json.loads((qwen3[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ConfigError, match=words):
        ModelConfig.read(tmp_path)


def test_older_configs_give_rope_theta_and_scaling_at_the_top(qwen3, tmp_path: Path):
    config = json.loads((qwen3[0] / "config.json").read_text())
    config.pop("rope_parameters", None)
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}))
    assert ModelConfig.read(tmp_path).rope == {"type": "linear", "factor": 2.0, "rope_theta": 5e5, "rope_type": "linear"}


def test_eos_comes_from_both_configs(qwen3, tmp_path: Path):
    (tmp_path / "config.json").write_text((qwen3[0] / "config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 9]}))
    assert ModelConfig.read(tmp_path).eos_token_ids == {1, 9}
