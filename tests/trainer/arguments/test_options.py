"""Megatron's options: each accepted with its value, or refused in one sentence; the same on the command line and in a file."""

import ast
import contextlib
import re
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from slimebus.bus.errors import ConfigError
from slimebus.cli.config.flags import META
from slimebus.cli.config.schema import paths
from slimebus.cli.root import root
from trainer.arguments.command_line import TrainerFlags, help_text
from trainer.arguments.fields import class_of, megatron_fields
from trainer.arguments.option_table import kind_of, option_table, spellings
from trainer.arguments.options import read_options
from trainer.model.megatron_fields import split_megatron_options

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
        ("attention_backend", "flash", "attention_backend", "flash"),
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
        ("use_flash_attn", True, "attention_backend", "flash"),
        ("decoder_first_pipeline_num_layers", 3, "num_layers_in_first_pipeline_stage", 3),
        ("check_for_nan_in_loss_and_grad", False, "check_for_nan_in_grad", False),
    ],
)
def test_a_right_value_is_taken(key: str, value: object, field: str, held: object) -> None:
    options = read_options({key: value})
    assert not options.problems
    assert options.values == {field: held}


@pytest.mark.parametrize(
    ("key", "value", "field", "held"),
    [
        ("swiglu", True, "gated_linear_unit", True),
        ("disable_bias_linear", True, "add_bias_linear", False),
        ("norm_epsilon", "1e-6", "layernorm_epsilon", 1e-6),
        ("num_experts", 8, "num_moe_experts", 8),
        ("apply_layernorm_1p", True, "layernorm_zero_centered_gamma", True),
        ("untie_embeddings_and_output_weights", True, "untie_embeddings_and_output_weights", True),
        ("window_size", [128, -1], "window_size", [128, -1]),
    ],
)
def test_what_is_said_of_the_model_is_kept_apart(key: str, value: object, field: str, held: object) -> None:
    options = read_options({key: value})
    assert not options.problems
    assert (options.values, options.model) == ({}, {field: held})


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
        ({"exp_avg_dtype": "int8"}, "got 'int8'; expected one of fp32, bf16, fp16, fp8"),
        ({"window_size": "3"}, "got '3'; expected none or 2 values with commas between"),
        ({"recompute_modules": "core_atn"}, "expected none or several with commas between, each one of core_attn, moe_act"),
        ({"init_method": "x"}, "is an object of Python's, which no option can carry"),
        ({"recompute_granularty": "full"}, "no field of Megatron's configs; did you mean 'recompute_granularity'?"),
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
        ({"fp8_margin": 1}, "without effect unless fp8 is set"),
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
    import torch
    from megatron.core.transformer.enums import AttnBackend

    given = {"attention_backend": "flash", "overlap_grad_reduce": True, "overlap_param_gather": True, "swiglu": True}
    split = split_megatron_options(given | {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16"})
    assert split["TransformerConfig"] == {"attention_backend": AttnBackend.flash}
    assert split["DistributedDataParallelConfig"] == {"overlap_grad_reduce": True, "overlap_param_gather": True}
    assert split["OptimizerConfig"]["exp_avg_dtype"] is torch.bfloat16
    assert split["OptimizerConfig"]["overlap_param_gather"] is True


def test_every_field_that_is_no_object_has_a_kind_that_takes_its_default() -> None:
    """Of the installed version: where its own default cannot be read, an annotation has come that nothing here knows."""
    for name, field in megatron_fields().items():
        if field.is_option:
            assert kind_of(name).words, field
            with contextlib.suppress(ValueError, SyntaxError):
                default = ast.literal_eval(field.default)
                assert name == "suggested_communication_unit_size" or _reads(name, default), field


def _reads(name: str, default: object) -> bool:
    try:
        return kind_of(name).read(default) == default
    except ValueError:
        return megatron_fields()[name].annotation == "torch.dtype"  # one of them has the default None


def test_the_tables_name_fields_of_the_installed_version() -> None:
    known = megatron_fields().keys()
    table = option_table()
    assert not table.of_the_model - known
    assert not table.fixed.keys() - known
    assert not table.in_force.keys() - table.fixed.keys()
    assert not {*table.needs, *table.needs.values()} - known
    assert not table.choices.keys() - known - table.model_options.keys()
    assert not {spelling.field for spelling in table.spellings.values()} - known
    assert not table.instead.keys() & (known | spellings().keys())
    assert not table.of_the_model & table.fixed.keys()
    assert not table.model_options.keys() & known
    assert len(known) > 300, "the config classes of megatron-core"
    assert class_of("TransformerConfig").name == "TransformerConfig"


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
    ("words", "text"),
    [
        ("--recompute-granularty full", "--recompute-granularity"),
        ("--max-token-per-gpu 3", "--max-tokens-per-gpu"),
        ("--recompute-granularity", "requires an argument"),
    ],
)
def test_a_wrong_flag_is_told_with_the_nearest(words: str, text: str) -> None:
    with pytest.raises(click.UsageError) as bad:
        flags(*words.split())
    assert text in bad.value.format_message()


@pytest.mark.parametrize("words", ["--use-tis", "--learning-rate 1e-6", "--ppo-epochs 2", "--use-kl-loss"])
def test_a_flag_of_slime_or_verl_is_told_with_its_name_here(words: str) -> None:
    with pytest.raises(click.NoSuchOption) as bad:
        flags(*words.split())
    assert bad.value.format_message().endswith(f"Did you mean '{option_table().other_names[words.split()[0][2:]]}'?")


def test_what_is_suggested_for_other_names_exists_and_the_document_has_it() -> None:
    fields = {name.rpartition(".")[2].replace("_", "-") for name in paths()}
    for other, ours in option_table().other_names.items():
        flag = ours.split()[0].removeprefix("--")
        assert flag in fields or TrainerFlags().flag(flag) is not None
        assert other not in fields
        assert TrainerFlags().flag(other) is None
    page = (ROOT / "docs" / "algorithms.md").read_text()
    assert dict(re.findall(r"^\| `--([\w-]+)` \| `(--[\w -]+)` \|$", page, re.MULTILINE)) == option_table().other_names


def test_a_setting_of_an_own_plug_in_is_told_with_its_prefix(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("class Own:\n    class Settings:\n        soft_cap: float = 1.0\n")
    (tmp_path / "run.yaml").write_text("algorithm:\n  corrections: [own.py:Own]\n")
    with pytest.raises(click.NoSuchOption) as bad:
        flags("--soft-cap", "2", str(tmp_path / "run.yaml"))
    assert bad.value.format_message() == "No such option '--soft-cap'. Did you mean '--algorithm-soft-cap'?"


@pytest.mark.parametrize("word", ["--soft-cap", "--frobnicate", "--wandb-project"])
def test_for_a_name_that_is_like_no_other_nothing_is_suggested(word: str) -> None:
    with pytest.raises(click.NoSuchOption) as bad:
        flags(word, "2", "run.yaml")
    assert "mean" not in bad.value.format_message()


def test_every_option_is_a_flag_and_is_in_the_help() -> None:
    text = help_text(100)
    for name, field in megatron_fields().items():
        flag = f"--{name.replace('_', '-')}"
        if field.is_option:
            assert f"\n  {flag}  [" in text
            assert TrainerFlags().flag(flag.removeprefix("--")) is not None
        else:
            assert f"\n  {flag}  [" not in text
    assert "the memory intensive part of attention" in text.replace("\n     ", ""), "Megatron's own words"
    assert all(f"--{name.replace('_', '-')}  =  " in text for name in spellings())


def test_megatrons_help_needs_no_torch_and_less_than_a_second() -> None:
    code = "import sys; from slimebus.__main__ import main; sys.argv = ['slimebus', 'trainer', '--help-megatron']\n"
    code += "try: main()\nfinally: assert not {'torch', 'megatron.core'} & set(sys.modules)"
    start = time.process_time(), time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True, text=True, timeout=60)
    used = time.monotonic() - start[1]
    assert "TransformerConfig:" in done.stdout
    assert used < 10, "0.3 s on an idle core"


def test_the_spellings_table_of_the_document_is_the_codes() -> None:
    page = (ROOT / "docs" / "megatron.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `--")]
    for name, spelling in option_table().spellings.items():
        value = "" if spelling.value is None else f": {str(spelling.value).lower()}"
        assert f"| `--{name.replace('_', '-')}` | `{spelling.field}{value}` |" in rows
    for name, instead in option_table().instead.items():
        assert f"| `--{name.replace('_', '-')}` | {instead} |" in rows
    assert len(rows) == len(option_table().spellings) + len(option_table().instead)
