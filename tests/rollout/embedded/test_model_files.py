"""Reading a model directory: whole, or an error that names what is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_model import SHAPE

from rollout.embedded.model_config import EmbeddedModelConfig
from rollout.embedded.model_weights import ModelFiles, ModelWeights, expected_shapes
from slimebus.bus.errors import ConfigError, WeightsError
from slimebus.weights.host.safetensors_file import as_weights
from slimebus.weights.host.shared_folder import SharedFolder, SharedVersion
from slimebus.weights.tensors import as_tensor


@pytest.fixture
def tensors(qwen3, tmp_path: Path):
    """(config, tensors) of the model, to be saved again in tmp_path."""
    path, _ = qwen3
    return EmbeddedModelConfig.read(path), load_file(path / "model.safetensors")


def read(path: Path, config: EmbeddedModelConfig) -> dict[str, torch.Tensor]:
    """All tensors of a model directory that the engine serves."""
    files = ModelFiles(path, config)
    return {name: files.read(name)[1] for name in expected_shapes(config)}


def test_bf16_is_read_as_float32_without_a_change(tensors, qwen3):
    config, saved = tensors
    served = served_by(ModelWeights(qwen3[0], config, torch.float32))
    assert all(torch.equal(served[name], saved[name].float()) for name in expected_shapes(config))


def test_shards_listed_by_an_index_are_read_together(tensors, tmp_path: Path):
    config, saved = tensors
    names = sorted(saved)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in shards.items():
        save_file({name: saved[name] for name in held}, tmp_path / file)
    weight_map = {name: file for file, held in shards.items() for name in held}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert sorted(read(tmp_path, config)) == names


def test_an_index_cannot_name_a_file_elsewhere(tensors, tmp_path: Path):
    config, _ = tensors
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../x.safetensors"}}))
    with pytest.raises(WeightsError, match="outside of"):
        read(tmp_path, config)


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
        read(tmp_path, config)


def test_a_torn_file_is_refused(tensors, qwen3, tmp_path: Path):
    config, _ = tensors
    whole = (qwen3[0] / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(WeightsError, match="not a whole safetensors file"):
        read(tmp_path, config)


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
        EmbeddedModelConfig.read(tmp_path)


def test_older_configs_give_rope_theta_and_scaling_at_the_top(qwen3, tmp_path: Path):
    config = json.loads((qwen3[0] / "config.json").read_text())
    config.pop("rope_parameters", None)
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}))
    assert EmbeddedModelConfig.read(tmp_path).rope == {"type": "linear", "factor": 2.0, "rope_theta": 5e5, "rope_type": "linear"}


def test_eos_comes_from_both_configs(qwen3, tmp_path: Path):
    (tmp_path / "config.json").write_text((qwen3[0] / "config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 9]}))
    assert EmbeddedModelConfig.read(tmp_path).eos_token_ids == {1, 9}


# --- versions that a worker hands over ---


def shared(folder: SharedFolder, saved: dict[str, torch.Tensor], model: Path, version: int = 0) -> SharedVersion:
    """What a worker makes of these tensors."""
    made = {name: ("bfloat16", tuple(t.shape), t.contiguous().view(torch.uint8).numpy().reshape(-1)) for name, t in saved.items()}
    weights = as_weights({name: as_tensor(name, value) for name, value in made.items()}, lineage="one", version=version)
    return folder.make_version(folder.place_in_memory(weights), model)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[SharedFolder]:
    (tmp_path / "shm").mkdir()
    made = SharedFolder(tmp_path / "shm")
    yield made
    made.close()


def memory(weights: ModelWeights) -> dict[str, int]:
    """Where each tensor is."""
    return {form.name: unit.matrix.data_ptr() for unit in weights.units.values() for form in unit.forms}


def served_by(weights: ModelWeights) -> dict[str, torch.Tensor]:
    """Each tensor as it stands in the matrices, where a norm of each head is repeated for every head."""
    found = {}
    for unit in weights.units.values():
        is_repeated = len(unit.forms[0].shape) < unit.matrix.dim()
        heads = [SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"]]
        parts = unit.matrix.split(heads if is_repeated else [form.shape[0] for form in unit.forms])
        assert not is_repeated or all(bool((part == part[:1]).all()) for part in parts)
        found |= {form.name: part[0] if is_repeated else part for form, part in zip(unit.forms, parts, strict=True)}
    return found


def test_what_changed_is_written_over_what_it_replaces_and_nothing_else_is_read(
    tensors, qwen3, folder: SharedFolder, monkeypatch: pytest.MonkeyPatch
):
    config, saved = tensors
    old = ModelWeights(shared(folder, saved, qwen3[0]).directory, config, torch.float32)
    before, places = served_by(old), memory(old)
    changed = "model.layers.1.mlp.up_proj.weight"
    other = saved | {changed: saved[changed] + 1}
    newer = shared(folder, other, qwen3[0], version=1)
    read_names, read_one = [], ModelFiles.read
    monkeypatch.setattr(ModelFiles, "read", lambda self, name: read_names.append(name) or read_one(self, name))
    new = ModelWeights(newer.directory, config, torch.float32, old=old)
    assert set(read_names) == {"model.layers.1.mlp.gate_proj.weight", changed}, "what is fused with it, too"
    assert all(torch.equal(values, saved[name].float()) for name, values in before.items()), "the old one is still in use"
    new.take_over()
    assert memory(new) == places
    assert all(torch.equal(values, other[name].float()) for name, values in served_by(new).items())


def test_what_is_served_out_of_the_workers_memory_is_exchanged_and_not_written_to(tensors, qwen3, folder: SharedFolder):
    config, saved = tensors
    old = ModelWeights(shared(folder, saved, qwen3[0]).directory, config, torch.bfloat16)
    norm = old.norm
    changed = saved | {"model.norm.weight": saved["model.norm.weight"] + 1}
    new = ModelWeights(shared(folder, changed, qwen3[0], version=1).directory, config, torch.bfloat16, old=old)
    new.take_over()
    assert torch.equal(new.norm, changed["model.norm.weight"])
    assert torch.equal(norm, saved["model.norm.weight"])


def test_a_checkpoint_is_the_first_version_already(tensors, qwen3, folder: SharedFolder):
    config, saved = tensors
    start = ModelWeights(qwen3[0], config, torch.float32)
    assert memory(ModelWeights(shared(folder, saved, qwen3[0]).directory, config, torch.float32, old=start)) == memory(start)


def test_a_directory_from_elsewhere_after_a_shared_one_is_served(tensors, qwen3, folder: SharedFolder, tmp_path: Path):
    config, saved = tensors
    old = ModelWeights(shared(folder, saved, qwen3[0]).directory, config, torch.float32)
    other = saved | {"model.norm.weight": saved["model.norm.weight"] + 1}
    save_file(other, tmp_path / "model.safetensors")
    new = ModelWeights(tmp_path, config, torch.float32, old=old)
    new.take_over()
    assert torch.equal(new.norm, other["model.norm.weight"].float())
    assert new.embedding is old.embedding


def test_served_as_stored_is_the_workers_memory(tensors, qwen3, folder: SharedFolder):
    config, saved = tensors
    version = shared(folder, saved, qwen3[0])
    weights = ModelWeights(version.directory, config, torch.bfloat16)
    maps = Path("/proc/self/maps").read_text().splitlines()

    def file_at(address: int) -> str:
        spans = ((line.split("-")[0], line.split("-")[1].split()[0], line.split()[-1]) for line in maps)
        return next((file for start, end, file in spans if int(start, 16) <= address < int(end, 16)), "")

    for name in ("model.embed_tokens.weight", "model.norm.weight", "model.layers.0.mlp.down_proj.weight"):
        assert file_at(memory(weights)[name]).endswith(version.tensors[name].file.name)
    weights.norm.zero_()
    assert torch.equal(ModelWeights(version.directory, config, torch.bfloat16).norm, saved["model.norm.weight"]), "the file never changes"


def test_files_of_elsewhere_are_copied_for_they_may_change(tensors, qwen3, tmp_path: Path):
    config, saved = tensors
    save_file(saved, tmp_path / "model.safetensors")
    weights = ModelWeights(tmp_path, config, torch.bfloat16)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.write(bytes(file.seek(0, 2) - file.seek(0)))
    assert all(torch.equal(served, saved[name]) for name, served in served_by(weights).items())


@pytest.mark.parametrize("damage", [lambda b: b[:-1] + bytes([b[-1] ^ 1]), lambda b: b[:-1], lambda b: b""])
def test_a_damaged_shared_tensor_is_refused_by_name(tensors, qwen3, folder: SharedFolder, damage):
    config, saved = tensors
    tensor = shared(folder, saved, qwen3[0]).tensors["model.norm.weight"]
    content = tensor.file.read_bytes()
    tensor.file.chmod(0o600)
    tensor.file.write_bytes(damage(content))
    with pytest.raises(WeightsError, match=tensor.file.name):
        ModelWeights(tensor.file.parent, config, torch.float32)


@pytest.mark.parametrize("change", ["unlink", "swap", "unnamed"])
def test_an_index_that_does_not_fit_its_files_is_refused(tensors, qwen3, folder: SharedFolder, change: str):
    config, saved = tensors
    version = shared(folder, saved, qwen3[0])
    first, second = version.tensors["model.norm.weight"], version.tensors["model.layers.0.input_layernorm.weight"]
    index = version.directory / "model.safetensors.index.json"
    if change == "unlink":
        first.file.unlink()
    elif change == "swap":
        index.write_text(index.read_text().replace(first.file.name, second.file.name))
    else:
        said = json.loads(index.read_text())
        said["metadata"]["hashes"].pop("model.norm.weight")
        index.write_text(json.dumps(said))
    with pytest.raises(WeightsError):
        ModelWeights(version.directory, config, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_served_is_what_was_published(tensors, qwen3, folder: SharedFolder, dtype: torch.dtype):
    config, saved = tensors
    served = served_by(ModelWeights(shared(folder, saved, qwen3[0]).directory, config, dtype))
    assert served.keys() == saved.keys()
    assert all(torch.equal(values.to(torch.bfloat16), saved[name]) for name, values in served.items())
