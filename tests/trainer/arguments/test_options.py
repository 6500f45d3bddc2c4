"""Megatron's options: each accepted with its value, or refused in one sentence; the same on the command line and in a file."""

from pathlib import Path

import click
import pytest
import torch
from megatron.core.transformer.enums import AttnBackend

from slimebus.bus.errors import ConfigError
from slimebus.cli.root import root
from slimebus.config.convert import other_names
from slimebus.config.flags import META, ExternalOption
from slimebus.config.schema import paths
from trainer.arguments import command_line
from trainer.arguments.checks import option_table
from trainer.arguments.command_line import TrainerOptions, help_text
from trainer.arguments.megatron_options import options, read_options, spellings, split_megatron_options
from trainer.objective.plugin_settings import known_settings

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("key", "value", "field", "held"),
    [
        ("adam_eps", "1e-7", "adam_eps", 1e-7),
        ("adam-eps", 1e-7, "adam_eps", 1e-7),
        ("bucket_size", "40000", "bucket_size", 40000),
        ("bucket_size", "none", "bucket_size", None),
        ("overlap_grad_reduce", "true", "overlap_grad_reduce", True),
        ("overlap_grad_reduce", False, "overlap_grad_reduce", False),
        ("recompute_granularity", "full", "recompute_granularity", "full"),
        ("recompute_granularity", None, "recompute_granularity", None),
        ("attention_backend", "flash", "attention_backend", AttnBackend.flash),
        ("attention_dropout", 0, "attention_dropout", 0.0),
        ("moe_aux_loss_coeff", "0.1,0.2", "moe_aux_loss_coeff", [0.1, 0.2]),
        ("moe_aux_loss_coeff", 0.1, "moe_aux_loss_coeff", 0.1),
        ("moe_router_load_balancing_type", "none", "moe_router_load_balancing_type", "none"),
        ("pipeline_model_parallel_layout", "Et|tttL", "pipeline_model_parallel_layout", "Et|tttL"),
        ("pipeline_model_parallel_layout", "Et*3|(tt|)*2,L", "pipeline_model_parallel_layout", "Et*3|(tt|)*2,L"),
        ("cp_comm_type", "a2a+p2p", "cp_comm_type", "a2a+p2p"),
        ("use_distributed_optimizer", True, "use_distributed_optimizer", True),
        ("recompute_activations", True, "recompute_granularity", "selective"),
        ("accumulate_allreduce_grads_in_fp32", "true", "grad_reduce_in_fp32", True),
        ("no_bias_swiglu_fusion", True, "bias_activation_fusion", False),
        ("bias_swiglu_fusion", False, "bias_activation_fusion", False),
        ("use_flash_attn", True, "attention_backend", AttnBackend.flash),
        ("decoder_first_pipeline_num_layers", 3, "num_layers_in_first_pipeline_stage", 3),
        ("check_for_nan_in_loss_and_grad", False, "check_for_nan_in_grad", False),
    ],
)
def test_a_right_value_is_taken(key: str, value: object, field: str, held: object) -> None:
    found = read_options({key: value})
    assert not found.problems
    assert found.values == {field: held}


@pytest.mark.parametrize(
    ("key", "value", "field", "held"),
    [
        ("swiglu", True, "gated_linear_unit", True),
        ("disable_bias_linear", True, "add_bias_linear", False),
        ("norm_epsilon", "1e-6", "layernorm_epsilon", 1e-6),
        ("num_experts", 8, "num_moe_experts", 8),
        ("apply_layernorm_1p", True, "layernorm_zero_centered_gamma", True),
        ("untie_embeddings_and_output_weights", True, "untie_embeddings_and_output_weights", True),
        ("window_size", [128, -1], "window_size", (128, -1)),
    ],
)
def test_what_is_said_of_the_model_is_kept_apart(key: str, value: object, field: str, held: object) -> None:
    found = read_options({key: value})
    assert not found.problems
    assert (found.values, found.model) == ({}, {field: held})


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"adam_eps": "small"}, "got 'small'; expected a number"),
        ({"adam_eps": "nan"}, "got 'nan'; expected a number"),
        ({"adam_eps": True}, "got true; expected a number"),
        ({"bucket_size": 1.5}, "got 1.5; expected none or a whole number"),
        ({"overlap_grad_reduce": "often"}, "got 'often'; expected true or false"),
        ({"swiglu": "very"}, "got 'very'; expected true or false"),
        ({"recompute_granularity": "ful"}, "got 'ful'; expected none or one of full, selective"),
        ({"attention_backend": "flsh"}, "got 'flsh'; expected one of flash, fused, unfused, local, auto"),
        ({"exp_avg_dtype": "int8"}, "got 'int8'; expected one of fp32, bf16, fp16, fp8, float32, bfloat16, float16"),
        ({"use_flash_attn": False}, "got none; expected one of flash"),
        ({"initialization": True}, "no field of Megatron's configs"),
        ({"window_size": "3"}, "got '3'; expected none or 2 values with commas between"),
        ({"recompute_modules": "core_atn"}, "expected none or several with commas between, each one of core_attn, moe_act"),
        ({"init_method": "x"}, "is an object of Python's, which no option can carry"),
        ({"recompute_granularty": "full"}, "and no option of slimebus; did you mean 'recompute_granularity'?"),
        ({"max_token_per_gpu": 3}, "and no option of slimebus; did you mean 'trainer.max_tokens_per_gpu'?"),
        ({"rollout_batch_size": 3}, "not here; set rollout.rollout_batch_size"),
        ({"qwertyuiop": 1}, "no field of Megatron's configs"),
        ({"lr": 1e-5}, "not here; set optimizer.lr"),
        ({"tensor_model_parallel_size": 2}, "not here; set trainer.tensor_model_parallel_size"),
        ({"bf16": True}, "not here; set trainer.params_dtype"),
        ({"micro_batch_size": 1}, "no option here: samples are packed into rows of at most trainer.max_tokens_per_gpu tokens"),
        ({"fp16": True}, "true is not possible: set trainer.params_dtype: bfloat16"),
        ({"use_distributed_optimizer": False}, "false is not possible: it always is distributed"),
        ({"num_layers_per_virtual_pipeline_stage": 1}, "1 is not possible: leave it out, each rank has one chunk of the model"),
        ({"calculate_per_token_loss": True}, "gradients would be multiplied"),
        ({"optimizer": "sgd"}, "'sgd' is not possible: only Adam is trained"),
        ({"recompute_method": "uniform"}, "without effect unless recompute_granularity is set"),
        ({"overlap_param_gather": True}, "without effect unless overlap_grad_reduce is set"),
        ({"fp8_margin": 1}, "without effect unless fp8 is set, which is not possible: packed rows are of any length"),
        ({"fp8": "hybrid"}, "'hybrid' is not possible: packed rows are of any length"),
        ({"fp4": "e2m1"}, "'e2m1' is not possible: packed rows are of any length"),
        ({"tp_comm_overlap": True}, "true is not possible: its buffers are made for rows of one length"),
        ({"defer_embedding_wgrad_compute": True}, "true is not possible: the output layer is computed together with the loss"),
        ({"use_cpu_optimizer_offload": True}, "a resumed run would train the initial weights again"),
        ({"optimizer_offload_fraction": 1.0}, "without effect unless optimizer_cpu_offload is set, which is not possible"),
        ({"use_precision_aware_optimizer": True}, "true is not possible: checkpoints hold fp32 weights and moments"),
        ({"swiglu": True, "gated_linear_unit": False}, "says false, but swiglu has said true; keep one of them"),
    ],
)
def test_a_wrong_option_is_told_in_one_sentence(given: dict, text: str) -> None:
    problems = read_options(given).problems
    assert len(problems) == 1
    assert text in problems[list(given)[-1]]
    with pytest.raises(ConfigError, match=f"megatron.{list(given)[-1]}: "):
        split_megatron_options(given)


def test_options_reach_the_classes_that_have_them() -> None:
    given = {"attention_backend": "flash", "overlap_grad_reduce": True, "overlap_param_gather": True, "swiglu": True}
    split = split_megatron_options(given | {"adam_eps": 1e-7})
    assert split["TransformerConfig"] == {"attention_backend": AttnBackend.flash}
    assert split["DistributedDataParallelConfig"] == {"overlap_grad_reduce": True, "overlap_param_gather": True}
    assert split["OptimizerConfig"] == {"overlap_param_gather": True, "adam_eps": 1e-7}
    assert options()["exp_avg_dtype"].convert("bf16") is torch.bfloat16
    assert options()["exp_avg_dtype"].convert("torch.float16") is torch.float16


def test_every_field_takes_its_default_or_is_an_object() -> None:
    """Of the installed version: where its own default cannot be read, an annotation has come that nothing here knows."""
    objects = {name for name, option in options().items() if not option.alternatives}
    assert all(name.endswith(("_func", "init_method", "_context")) or name in ("timers", "quant_recipe") for name in objects)
    own = options().keys() - option_table().model_options.keys() - objects
    plain = {name: options()[name].default for name in own if isinstance(options()[name].default, int | float | str | list)}
    assert len(plain) > 200
    assert {name: options()[name].convert(value) for name, value in plain.items()} == plain


def test_the_tables_name_fields_of_the_installed_version() -> None:
    table = option_table()
    known = options().keys() - table.model_options.keys()
    assert len(known) > 300, "the config classes of megatron-core"
    assert not table.of_the_model - known
    assert not table.fixed.keys() - known
    assert not table.forced_value.keys() - table.fixed.keys()
    assert not {*table.needs, *table.needs.values()} - known
    assert not table.choices.keys() - options().keys()
    assert not {spelling.field for spelling in table.spellings.values()} - known
    assert not table.rejected_with_hint.keys() & (known | spellings().keys())
    assert not table.of_the_model & table.fixed.keys()


# --- the command line ---


def flags(*words: str, command: str = "trainer") -> dict:
    found = root.get_command(click.Context(root), command)
    assert found is not None
    ctx = found.make_context(command, list(words))
    return {**ctx.meta.get(META, {}), "file": ctx.params.get("run_yaml") and str(ctx.params["run_yaml"])}


@pytest.mark.parametrize(
    ("words", "config"),
    [
        ("--recompute-granularity full run.yaml", {"megatron.recompute_granularity": "full"}),
        ("--recompute-modules core_attn mlp run.yaml", {"megatron.recompute_modules": "core_attn,mlp"}),
        ("--swiglu run.yaml", {"megatron.swiglu": "true"}),
        ("--no-overlap-grad-reduce run.yaml", {"megatron.overlap_grad_reduce": "false"}),
        ("--overlap-grad-reduce false run.yaml", {"megatron.overlap_grad_reduce": "false"}),
        ("--megatron-no-overlap-grad-reduce run.yaml", {"megatron.overlap_grad_reduce": "false"}),
        ("--no-rope-freq 4 run.yaml", {"megatron.no_rope_freq": "4"}),
        ("--window-size -1 128 run.yaml", {"megatron.window_size": "-1,128"}),
        ("--no-masked-softmax-fusion run.yaml", {"megatron.masked_softmax_fusion": "false"}),
        ("--no-check-for-nan-in-loss-and-grad run.yaml", {"megatron.check_for_nan_in_loss_and_grad": "false"}),
        ("--bf16 run.yaml", {"trainer.params_dtype": "bfloat16"}),
        ("--megatron-adam-eps=1e-7 run.yaml", {"megatron.adam_eps": "1e-7"}),
        ("--lr-warmup-iters 3 --tensor-model-parallel-size 2 run.yaml", {}),
        ("run.yaml --no-bias-swiglu-fusion --untie-embeddings-and-output-weights --group-query-attention", None),
    ],
)
@pytest.mark.parametrize("command", ["trainer", "up", "export"])
def test_flags_set_fields(command: str, words: str, config: dict | None) -> None:
    out = ["--out", "x"] if command == "export" else []
    got = flags(*words.split(), *out, command=command)
    assert got["file"] == "run.yaml"
    if config is not None:
        assert {name: value for name, value in got.items() if name.startswith(("megatron", "trainer.params"))} == config


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("--max-token-per-gpu", "--max-tokens-per-gpu"),
        ("--num-rolout", "--num-rollout"),
        ("--max-restart", "--max-restarts"),
        ("--broker.bind", "--bind"),
    ],
)
def test_an_option_that_is_nearly_one_of_slimebus_is_refused_at_once(word: str, nearest: str) -> None:
    with pytest.raises(click.NoSuchOption) as bad:
        flags(word, "3", "run.yaml")
    assert f"Did you mean '{nearest}'" in bad.value.format_message()


def test_no_option_of_megatron_is_taken_for_a_misspelled_one_of_slimebus() -> None:
    names = {*options(), *spellings(), *option_table().rejected_with_hint} - {name.rpartition(".")[2] for name in paths()}
    for command in ("trainer", "up", "export"):
        found = root.get_command(click.Context(root), command)
        assert not [name for name in names if found.external_option(f"--{name.replace('_', '-')}") is None]


def test_a_flag_of_slime_or_trl_is_no_option_of_megatron_or_an_algorithm() -> None:
    names = {name.replace("-", "_") for name in other_names()}
    assert not names & {*options(), *spellings(), *option_table().rejected_with_hint, *known_settings()}


def test_without_megatron_only_the_settings_of_algorithms_are_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line, "is_installed", lambda: False)
    assert TrainerOptions().option("eps-clip") == ExternalOption("algorithm.settings.eps_clip")
    with pytest.raises(click.NoSuchOption, match="No such option '--overlap-grad-reduce'"):
        flags("--overlap-grad-reduce", "run.yaml")


def test_every_option_is_in_the_help_once() -> None:
    text = help_text(100)
    for name, option in options().items():
        times = text.count(f"\n  --{name.replace('_', '-')}  [")
        assert times == (1 if option.alternatives and name not in option_table().model_options else 0), name
    assert "the memory intensive part of attention" in text.replace("\n     ", ""), "Megatron's own words"
    order = [
        "ModelParallelConfig:",
        "--overlap-p2p-comm  [true or false; default false]",
        "OptimizerConfig:",
        "--adam-eps  [a number; default 1e-08]",
    ]
    assert sorted(order, key=text.index) == order
    assert all(f"--{name.replace('_', '-')}  =  " in text for name in spellings())


def test_the_spellings_table_of_the_document_is_the_codes() -> None:
    page = (ROOT / "docs" / "megatron.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `--")]
    for name, spelling in option_table().spellings.items():
        value = "" if spelling.value is None else f": {str(spelling.value).lower()}"
        assert f"| `--{name.replace('_', '-')}` | `{spelling.field}{value}` |" in rows
    for name, hint in option_table().rejected_with_hint.items():
        assert f"| `--{name.replace('_', '-')}` | {hint} |" in rows
    assert len(rows) == len(option_table().spellings) + len(option_table().rejected_with_hint)


@pytest.mark.parametrize("value", ["attn,mlp", "no_such_scope", "", []])
def test_a_scope_of_graphs_that_are_never_made_is_refused_before_megatron_looks_it_up(value: object) -> None:
    assert "a CUDA graph has one" in read_options({"cuda_graph_scope": value}).problems["cuda_graph_scope"]
