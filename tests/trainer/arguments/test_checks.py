"""Contradictions between options, layout and model folder are told before any rank starts, Megatron's own refusals among them."""

import json
import re
from pathlib import Path

import pytest

from slimebus.bus.errors import ConfigError
from slimebus.config import Resolved, RunConfig
from slimebus.config.file_checks import file_problems
from slimebus.config.load import resolve
from slimebus.config.schema import ModelConfig, TrainerConfig
from trainer.arguments import checks
from trainer.arguments.checks import check_layout, megatron_problems, model_problems
from trainer.arguments.megatron_options import check_architecture, make_config
from trainer.model.megatron_check import check

DENSE = {
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": 38,
    "rope_parameters": {"rope_theta": 1e6},
    "tie_word_embeddings": True,
}
UNKNOWN = "no field of Megatron's configs, and no option of slimebus"
MOE = DENSE | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


@pytest.fixture(autouse=True)
def megatron_is_asked_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in a process of its own, which takes seconds, except where that is the point."""
    if "in_its_own_process" not in request.node.name:
        monkeypatch.setattr(checks, "ask_megatron", check)


def problems(folder: Path, megatron: dict, model: dict = DENSE, *, world_size: int = 0, **trainer: object) -> list[str]:
    (folder / "config.json").write_text(json.dumps(model))
    config = RunConfig(megatron=megatron, trainer=TrainerConfig(**trainer), model=ModelConfig(hf_checkpoint=str(folder)))
    return megatron_problems(Resolved(config, {}, folder), world_size)


SCRIPT = """
--swiglu --num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --group-query-attention --num-query-groups 2
--use-rotary-position-embeddings --disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-6 --rotary-base 1000000 --vocab-size 38
--kv-channels 16 --attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32
--attention-backend flash --overlap-grad-reduce --overlap-param-gather --use-distributed-optimizer
"""
"""As the script of a Megatron-LM run has them."""


def test_the_model_arguments_of_a_script_may_stay(tmp_path: Path) -> None:
    given = {name: value or True for name, value in re.findall(r"--(\S+)(?: ([^-\s]\S*))?", SCRIPT)}
    assert len(given) == 22
    assert not problems(tmp_path, given)
    assert not problems(tmp_path, given, tensor_model_parallel_size=2, sequence_parallel=True, pipeline_model_parallel_size=2)


def test_all_mistakes_are_found_in_its_own_process_with_their_places(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("class Own:\n    class Settings:\n        soft_cap: float = 1.0\n")
    run = tmp_path / "run.yaml"
    run.write_text(
        "algorithm: {corrections: [own.py:Own]}\nmegatron:\n  adam_eps: .nan\n  bucket_size: 123456789012345678901234\n  soft_cep: 1\n"
    )
    flags = {"megatron.max_token_per_gpu": "3", "megatron.recompute_granularty": "full"}
    assert megatron_problems(resolve(run, flags, environ={})) == [
        f"{run}:3: megatron.adam_eps: got nan; expected a number",
        f"{run}:5: megatron.soft_cep: {UNKNOWN}; did you mean 'algorithm.settings.soft_cap'?",
        f"--max-token-per-gpu: megatron.max_token_per_gpu: {UNKNOWN}; did you mean 'trainer.max_tokens_per_gpu'?",
        f"--recompute-granularty: megatron.recompute_granularty: {UNKNOWN}; did you mean 'recompute_granularity'?",
    ]


def test_megatrons_refusal_is_told_in_its_own_process(tmp_path: Path) -> None:
    [refused] = problems(tmp_path, {"recompute_granularity": "full"})
    assert 'recompute_method must be "block" or "uniform" (Megatron\'s own check of recompute_granularity in this layout)' in refused


def test_what_cannot_be_asked_in_its_own_process_is_left_to_the_ranks_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checks.sys, "executable", "/bin/false")
    assert not problems(tmp_path, {"recompute_granularity": "full"})
    assert "Megatron could not check its options before the ranks start" in caplog.text


def test_without_options_nothing_is_asked_in_its_own_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.subprocess, "run", lambda *args, **kw: pytest.fail("a process was started"))
    assert not problems(tmp_path, {}, world_size=4)
    assert problems(tmp_path, {}, world_size=3, pipeline_model_parallel_size=2)


@pytest.mark.parametrize(
    ("megatron", "text"),
    [
        ({"num_layers": 5}, "megatron.num_layers: 5, but the model folder's config.json makes it 4, and decides; leave it out"),
        ({"norm_epsilon": 1e-5}, "megatron.norm_epsilon: 1e-05, but the model folder's config.json makes it 1e-06"),
        ({"rotary_base": 10000}, "makes it 1000000"),
        ({"untie_embeddings_and_output_weights": True}, "makes it false"),
        ({"swiglu": False}, "megatron.swiglu: false, but the model folder's config.json makes it true"),
        ({"num_experts": 4}, "megatron.num_experts: 4, but the model's config.json has nothing of the kind"),
        ({"expert_model_parallel_size": 2}, "2, but the model has no experts (config.json); leave it out"),
        ({"moe_aux_loss_coeff": 0.1}, "0.1, but the model has no experts"),
        ({"recompute_granularity": "selective", "recompute_method": "block"}, "recomputes its modules in every layer; leave it out"),
        (
            {"recompute_granularity": "full", "recompute_method": "block"},
            "recompute_num_layers must be between 1 and num_layers_per_pipeline",
        ),
        ({"recompute_granularity": "full"}, 'recompute_method must be "block" or "uniform"'),
        ({"num_layers_in_first_pipeline_stage": 1}, "there is one pipeline stage; set trainer.pipeline_model_parallel_size"),
        ({"moe_token_dispatcher_type": "allgather"}, "does not support variable sequence length"),
        ({"cpu_offloading": True, "cpu_offloading_num_layers": 9}, "CPU offloading can be done only for layers less than 4"),
        ({"fp8_param_gather": False, "reuse_grad_buf_for_mxfp8_param_ag": True}, "Reuse grad buffer only when keeping params in MXFP8"),
    ],
)
def test_a_contradiction_is_one_line(tmp_path: Path, megatron: dict, text: str) -> None:
    (found,) = problems(tmp_path, megatron)
    assert text in found
    assert "\n" not in found


@pytest.mark.parametrize(
    ("megatron", "trainer", "text"),
    [
        ({"expert_model_parallel_size": 3}, {}, "3 does not divide the model's 4 experts"),
        ({"expert_model_parallel_size": 2}, {"tensor_model_parallel_size": 2}, "need trainer.sequence_parallel: true"),
        ({"moe_aux_loss_coeff": "0.1,0.2", "moe_router_load_balancing_type": "aux_loss,none"}, {}, ""),
        ({"moe_expert_capacity_factor": 1.0}, {}, "1.0 is not possible: what an expert drops"),
        ({"moe_z_loss_coeff": 1e-3}, {}, "0.001 is not possible: each packed row weighs the same"),
        ({"moe_router_force_load_balancing": True}, {}, "true is not possible: it routes at random"),
        ({"moe_router_load_balancing_type": "aux_loss,none"}, {}, "moe_aux_loss_coeff must be a list of the same length"),
        ({"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, {}, ""),
        ({"num_layers_in_first_pipeline_stage": 1}, {"pipeline_model_parallel_size": 2}, ""),
        ({"num_layers_in_first_pipeline_stage": 4}, {"pipeline_model_parallel_size": 2}, "Mismatch: 0 middle layers remaining"),
    ],
)
def test_contradictions_of_a_model_with_experts(tmp_path: Path, megatron: dict, trainer: dict, text: str) -> None:
    found = problems(tmp_path, megatron, MOE, **trainer)
    assert len(found) == bool(text)
    assert all(text in one for one in found)


def test_ranks_that_do_not_divide_are_refused_in_one_line(tmp_path: Path) -> None:
    two = TrainerConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    with pytest.raises(
        ConfigError,
        match=r"6 trainer ranks do not divide by 4 = tensor 2 x pipeline 2 x context 1;.* or lower tensor or pipeline parallelism$",
    ):
        check_layout(two, 6, (1, 1))
    with pytest.raises(
        ConfigError, match=r"6 trainer ranks do not divide by 4 = tensor 1 x pipeline 1 x expert 4;.* or lower expert parallelism$"
    ):
        check_layout(TrainerConfig(), 6, (4, 1))
    wide: dict = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    assert not problems(tmp_path, {"expert_model_parallel_size": 4}, MOE, world_size=4, **wide)
    (found,) = problems(tmp_path, {"expert_model_parallel_size": "4", "expert-tensor-parallel-size": 2}, MOE, world_size=4, **wide)
    assert "4 trainer ranks do not divide by 8 = tensor 2 x pipeline 1 x expert 4" in found


def test_what_only_a_rank_knows_is_refused_there() -> None:
    class Config:
        qk_layernorm = True

    check_architecture(Config, {"qk_layernorm": True})
    with pytest.raises(ConfigError, match=r"megatron\.qk_layernorm: false, but the model folder's config\.json makes it true"):
        check_architecture(Config, {"qk_layernorm": False})


def test_megatrons_own_refusal_on_a_rank_is_a_config_error() -> None:
    from megatron.core.optimizer import OptimizerConfig

    with pytest.raises(ConfigError, match="megatron: --use-precision-aware-optimizer only supported with"):
        make_config(OptimizerConfig, {"use_precision_aware_optimizer": True})


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
DEEPSEEK = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (DENSE, ""),
        (DENSE | {"sliding_window": 4096}, ""),  # transformers: use_sliding_window is false
        ({"model_type": "deepseek_v3", "rope_scaling": DEEPSEEK, "topk_group": 4, "n_group": 8}, ""),
        (DENSE | {"model_type": "mixtral"}, "model_type 'mixtral' cannot be trained: its router was measured"),
        (DENSE | {"model_type": "gemma3"}, "model_type 'gemma3' is not verified"),
        (DENSE | {"rope_parameters": YARN}, "rope_type is 'yarn', and only default are mapped"),
        ({k: v for k, v in DENSE.items() if k != "rope_parameters"} | {"rope_scaling": YARN}, "rope_type is 'yarn'"),
    ],
)
def test_a_model_that_the_trainer_refuses_is_told_by_config_check(tmp_path: Path, model: dict, text: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model))
    resolved = Resolved(RunConfig(model=ModelConfig(hf_checkpoint=str(tmp_path))), {}, tmp_path)
    found = [problem for problem in file_problems(resolved) if "model_type" in problem or "cannot be trained" in problem]
    assert found == model_problems(resolved)
    assert len(found) == bool(text)
    assert all(text in problem for problem in found)
