"""Every verified family against transformers: logits, weights bit for bit, and its export loaded again; and what is refused."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from model_families import CASES, save_case
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from slimebus.bus.errors import ConfigError
from slimebus.bus.samples import Sample
from slimebus.config import Resolved, RunConfig
from slimebus.config.schema import ModelConfig
from trainer.arguments.checks import model_problems
from trainer.batches.batch import TrainingGroup
from trainer.batches.flatten import flatten
from trainer.batches.packing import pack
from trainer.hf.families import VERIFIED, family_of
from trainer.model import parallel
from trainer.model.gpt import warn_of_balancing
from trainer.model.update import rank_layout

LENGTHS = (90, 7, 41)
"""Beyond original_max_position_embeddings, and several in one row."""


def sequences() -> list[np.ndarray]:
    draw = np.random.default_rng(1)
    return [draw.integers(0, 131, length).astype(np.int32) for length in LENGTHS]


def sample(tokens: np.ndarray) -> Sample:
    zeros = np.zeros(len(tokens), np.float32)
    return Sample(tokens=tokens, loss_mask=np.ones(len(tokens), np.uint8), rollout_logprobs=zeros, versions=[(0, len(tokens))], reward=1.0)


def logits_of(policy) -> list[torch.Tensor]:
    """[T - 1, V] of each sequence, what predicts its tokens from the second on; all sequences are packed in one row."""
    samples = [sample(tokens) for tokens in sequences()]
    batch = flatten([TrainingGroup("g", samples)])
    (row,) = pack(batch, np.arange(len(samples)), 1000, rank_layout(policy.model))
    policy.model.module.eval()
    with torch.no_grad():
        hidden = policy.model.module(row.tokens, row.positions, None, packed_seq_params=row.packed)
        logits = hidden @ policy.model.head.T
    flat = torch.empty(sum(LENGTHS), logits.shape[-1])
    flat[row.source[row.is_real]] = logits[row.is_real]
    return [rows[1:] for rows in flat.split(LENGTHS)]


def load_again(folder: Path) -> torch.nn.Module:
    """By transformers; it knows Kimi K2 under DeepSeek's name."""
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"kimi_k2"', '"deepseek_v3"'))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("name", CASES)
def test_family_is_what_transformers_has(name, tmp_path, build_policy):
    source, out = tmp_path / "model", tmp_path / "out"
    expected = save_case(source, name)
    assert not model_problems(Resolved(RunConfig(model=ModelConfig(hf_checkpoint=str(source))), {}, source))
    policy = build_policy(source)
    for tokens, logits in zip(sequences(), logits_of(policy), strict=True):
        with torch.no_grad():
            want = expected(torch.from_numpy(tokens).long()[None]).logits[0, :-1]
        torch.testing.assert_close(logits, want, atol=1e-4, rtol=0)
    policy.save_hf(str(out))
    before, after = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    assert after.keys() == before.keys()
    assert all(torch.equal(after[tensor], before[tensor]) for tensor in before)
    again, original = load_again(out).state_dict(), expected.state_dict()
    assert again.keys() == original.keys()
    assert all(torch.equal(again[tensor], original[tensor]) for tensor in original)


@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe", "deepseek_v3"])
def test_experts_are_chosen_by_fp32_scores_in_bfloat16_too(name, tmp_path, build_policy):
    """As engines choose them: scores rounded to bfloat16 would send tokens to other experts."""
    save_case(tmp_path, name, dtype="bfloat16")
    policy, seen = build_policy(tmp_path, dtype="bfloat16"), set()
    router = policy.model.gpt.decoder.layers[1].mlp.router
    router.routing = lambda logits, *args, made=router.routing, **options: seen.add(logits.dtype) or made(logits, *args, **options)
    policy.logprobs([TrainingGroup("g", [sample(sequences()[1])])])
    assert seen == {torch.float32}


def test_every_verified_type_has_a_case():
    assert {name.partition("-")[0] for name in CASES} == VERIFIED.keys()


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_bfloat16_keeps_the_router_bias_in_float32(name, tmp_path, build_policy):
    """Its values are far finer than bfloat16 has them."""
    save_case(tmp_path, name, dtype="bfloat16")
    tensors = load_file(tmp_path / "model.safetensors")
    biases = {tensor: value.float() + 1e-5 for tensor, value in tensors.items() if tensor.endswith("e_score_correction_bias")}
    save_file(tensors | biases, tmp_path / "model.safetensors", metadata={"format": "pt"})
    policy = build_policy(tmp_path, dtype="bfloat16")
    policy.save_hf(str(tmp_path / "out"))
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert biases
    assert all(torch.equal(exported[tensor], value) for tensor, value in (tensors | biases).items())


# --- what is refused ---


def test_a_family_that_is_not_verified_is_refused_with_those_that_are():
    with pytest.raises(ConfigError, match=r"'mistral' is not verified; verified are qwen2, qwen3, .*kimi_k2.*model.family: qwen2"):
        family_of("mistral")
    assert family_of("mistral", "llama").name == "llama"
    assert family_of("kimi_k2", "llama").name == "deepseek_v3"
    with pytest.raises(ConfigError, match="no family 'gpt'"):
        family_of("mistral", "gpt")


@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe"])
def test_what_was_measured_wrong_is_refused_even_when_a_family_is_named(model_type):
    with pytest.raises(ConfigError, match=r"cannot be trained.*logits"):
        family_of(model_type, "qwen3_moe")


REFUSED = {
    "quantised": ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "quantised .fp8."),
    "activation": ("qwen3", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "window": ("qwen2", {"use_sliding_window": True, "sliding_window": 4096}, "sliding-window"),
    "window of some layers": ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
    "window without a switch": ("llama", {"sliding_window": 4096}, "sliding-window"),
    "attention bias": ("llama", {"attention_bias": True}, "attention_bias"),
    "mlp bias": ("llama", {"mlp_bias": True}, "mlp_bias"),
    "yarn": ("qwen3", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn', and only default"),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear"}}, "only default and llama3"),
    "yarn without mscale": ("deepseek_v3", {"rope_parameters": {"rope_type": "yarn", "factor": 4}}, "lacks factor, mscale"),
    "yarn with a factor": (
        "deepseek_v3",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4, "mscale": 1, "mscale_all_dim": 1, "attention_factor": 2}},
        "attention_factor",
    ),
    "a part of a head": (
        "qwen3",
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
        "partial_rotary_factor is 0.5, and only whole heads",
    ),
    "one expert of all weight": ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": True}, "chooses one expert a token"),
    "rope of halves": ("deepseek_v3", {"rope_interleave": False}, "rope_interleave"),
    "dense layers": ("qwen3_moe", {"mlp_only_layers": [0]}, "dense"),
    "sparse steps": ("qwen3_moe", {"decoder_sparse_step": 2}, "dense"),
    "softmax scores": ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
    "weights as they are": ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob"),
    "one expert": ("glm4_moe", {"num_experts_per_tok": 1}, "one expert"),
    "groups of another size": ("deepseek_v3", {"n_group": 8, "topk_group": 4, "num_experts_per_tok": 4}, "not twice topk_group 4"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_features_that_are_not_mapped_are_refused(name):
    family, config, message = REFUSED[name]
    experts = {"num_experts_per_tok": 8} if family in ("glm4_moe", "deepseek_v3") else {}
    VERIFIED[family].check(experts)
    with pytest.raises(ConfigError, match=message):
        VERIFIED[family].check(experts | config)


def test_a_refused_feature_is_found_in_a_real_config(tmp_path, build_policy):
    """With the names that files have; a window that Qwen2 only uses when told."""
    save_case(tmp_path, "qwen2")
    config = json.loads((tmp_path / "config.json").read_text())
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_scaling": yarn}))
    with pytest.raises(ConfigError, match="this qwen2 cannot be trained: rope_type is 'yarn'"):
        build_policy(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}))
    with pytest.raises(ConfigError, match="sliding-window"):
        build_policy(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"use_sliding_window": False, "sliding_window": 64}))
    build_policy(tmp_path)


def test_attention_dropout_of_the_model_folder_is_left_out_and_said(tmp_path, build_policy, caplog):
    save_case(tmp_path, "qwen3")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    with caplog.at_level("INFO"):
        assert build_policy(tmp_path).model.config.attention_dropout == 0.0
    assert "config.json has attention_dropout 0.5: it is trained without dropout" in caplog.text


@pytest.mark.parametrize(
    ("kind", "coefficient", "warns"), [("none", 0.1, 0), ("aux_loss", 0.0, 0), ("aux_loss", 0.1, 1), (["aux_loss"], [0.1], 1)]
)
def test_a_balancing_loss_says_what_it_depends_on(kind, coefficient, warns, caplog, monkeypatch):
    monkeypatch.setattr(parallel, "is_main_rank", lambda: True)
    warn_of_balancing(SimpleNamespace(moe_router_load_balancing_type=kind, moe_aux_loss_coeff=coefficient))
    assert caplog.text.count("it depends on trainer.max_tokens_per_gpu and the number of ranks") == warns


def test_a_family_named_by_the_user_is_trained_as_it(tmp_path, build_policy, caplog):
    save_case(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "arcee"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="'arcee' is not verified"):
        build_policy(tmp_path)
    build_policy(tmp_path, family="llama")
    assert "is trained as llama" in caplog.text
