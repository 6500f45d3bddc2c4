"""What a config names is looked for on this machine, and everything that is missing is told at once."""

import gzip
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from slimebus.bus.errors import ConfigError
from slimebus.cli.commands.config import check, show
from slimebus.config import resolve
from slimebus.config.file_checks import file_problems
from trainer.arguments.checks import CheckReply

REWARD = "def reward(response):\n    return 1.0\n"


EMPTY_WEIGHTS = (2).to_bytes(8, "little") + b"{}"


def weights(num_bytes: int, present: int) -> bytes:
    """A safetensors file whose header names so many bytes of a tensor."""
    header = json.dumps({"__metadata__": {"format": "pt"}, "w": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}})
    return len(header).to_bytes(8, "little") + header.encode() + bytes(present)


def complete(folder: Path, **changes: Any) -> Path:
    """A run.yaml whose files are there; changes: section__field=value."""
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": "2+2=", "label": "4"}) + "\n")
    (folder / "model").mkdir(exist_ok=True)
    for name, content in {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": EMPTY_WEIGHTS}.items():
        (folder / "model" / name).write_bytes(content)
    (folder / "reward.py").write_text(REWARD)
    tree: dict[str, Any] = {"data": {"prompt_data": ["prompts.jsonl"]}, "model": {"hf_checkpoint": "model"}}
    for name, value in changes.items():
        section, _, field = name.partition("__")
        if field:
            tree.setdefault(section, {})[field] = value
        else:
            tree[section] = value
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    return folder / "run.yaml"


def problems(file: Path) -> str:
    return "\n".join(file_problems(resolve(file, environ={})))


def test_a_run_that_has_everything_is_ok(tmp_path: Path) -> None:
    file = complete(tmp_path, rollout__custom_rm_path="reward.py:reward", eval__datasets={"held": {"path": "prompts.jsonl@[0:1]"}})
    done = CliRunner().invoke(check, [str(file)])
    assert done.exit_code == 0, done.exception
    assert "ok: " in done.output


def test_a_machine_without_megatron_says_that_its_options_were_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "megatron" else find(name, *rest))
    done = CliRunner().invoke(check, [str(complete(tmp_path, megatron={"recompute_granularty": "full"}))])
    assert done.exit_code == 0, done.exception
    assert "section megatron: its options were not checked, as megatron-core or the trainer is not installed here" in done.output
    assert "section megatron" not in CliRunner().invoke(check, [str(complete(tmp_path))]).output
    assert "section megatron" not in CliRunner().invoke(check, ["--syntax", str(tmp_path / "run.yaml")]).output


def test_show_refuses_an_option_that_is_neither_slimebus_nor_megatrons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.arguments.checks.ask_megatron", lambda request: CheckReply({"frobnicate": "no field"}))
    refused = CliRunner().invoke(show, ["--frobnicate", "2"])
    assert isinstance(refused.exception, ConfigError)
    assert refused.exception.text == "--frobnicate: megatron.frobnicate: no field"
    assert CliRunner().invoke(show, ["--max-staleness", "2"]).exit_code == 0


def test_everything_that_is_missing_is_told_at_once(tmp_path: Path) -> None:
    file = complete(
        tmp_path,
        data__prompt_data=["absent.jsonl*2", "prompts.jsonl@[0:1]"],
        model__hf_checkpoint="no-model",
        rollout__custom_rm_path="reward.py:rewrad",
        rollout__custom_generate_function_path="generate.py:generate",
        broker__buffer_filter_path="nowhere.filter:choose",
        data__source_path="source.py:Source",
        eval__datasets={"held": {"path": "held.jsonl", "custom_rm_path": "held.py:reward"}},
        security__keys="no-keys",
        engine__engine="sglang",
        engine__engine_python="/nowhere/python",
    )
    done = CliRunner().invoke(check, [str(file)])
    assert isinstance(done.exception, ConfigError)
    text = done.exception.text
    assert text.startswith("10 mistakes:\n")
    for part in (
        "data.prompt_data: no such file",
        "absent.jsonl;",
        "no model at",
        "custom_rm_path: hook 'reward.py:rewrad': reward.py has no 'rewrad'; it has reward",
        "generate.py",
        "nowhere",
        "source.py",
        "eval.datasets.held.path: no such file",
        "held.py",
        "no-keys",
        "engine_python: no such file /nowhere/python; bin/install-sglang installs it",
    ):
        assert part in text, part
    assert CliRunner().invoke(check, [str(file), "--syntax"]).exit_code == 0


def test_a_model_without_a_tokenizer_or_weights_is_named(tmp_path: Path) -> None:
    file = complete(tmp_path)
    (tmp_path / "model" / "tokenizer.json").unlink()
    (tmp_path / "model" / "model.safetensors").unlink()
    assert "no tokenizer (tokenizer.json or tokenizer_config.json)" in problems(file)
    assert "no weights (*.safetensors)" in problems(file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (weights(8, 8), ""),
        (weights(8, 7), "model.safetensors is cut short: it has 1"),
        (weights(8, 8)[:20], "its header cannot be read"),
        (b"", "its header cannot be read"),
        (b"version https://git-lfs.github.com/spec/v1", "its header cannot be read"),
    ],
)
def test_weights_that_are_cut_short_are_refused_by_their_header(tmp_path: Path, content: bytes, message: str) -> None:
    file = complete(tmp_path)
    (tmp_path / "model" / "model.safetensors").write_bytes(content)
    assert bool(problems(file)) == bool(message)
    assert message in problems(file)


def test_weights_that_the_index_names_and_are_not_there_are_refused(tmp_path: Path) -> None:
    file = complete(tmp_path)
    (tmp_path / "model" / "model.safetensors.index.json").write_text('{"weight_map": {"w": "model-00002.safetensors"}}')
    assert "model-00002.safetensors: no such file, which model.safetensors.index.json names" in problems(file)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", b'\n{"question": "2+2", "label": "4"}\n', "p.jsonl:2: no 'prompt' (input_key); it has 'question', 'label'"),
        ("p.jsonl", b'{"prompt": "2+2", \n', "p.jsonl:1: "),
        ("p.jsonl", b"\n \n", "no prompts in "),
        ("p.jsonl.gz", gzip.compress(b'{"prompt": ""}\n'), "p.jsonl.gz:1: 'prompt' must be text"),
        ("p.parquet", b"PAR1 and nothing behind it", "cannot be read as parquet"),
    ],
)
def test_a_file_whose_first_line_is_no_prompt_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    file = complete(tmp_path, data__prompt_data=[name], rollout__custom_rm_path="reward.py:reward")
    assert "data.prompt_data: " in problems(file)
    assert message in problems(file)
    if name == "p.jsonl" and b"{" in content:
        assert not problems(complete(tmp_path, data__prompt_data=[name], data__skip_bad_prompts=True, rollout__rm_type="random"))


def test_a_slice_is_judged_by_its_own_first_line(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"comment": "none"}\n{"prompt": "2+2", "label": "4"}\n')
    assert not problems(complete(tmp_path, data__prompt_data=["p.jsonl@[1:]"]))


@pytest.mark.parametrize(("own", "field"), [({"rollout__rollout_max_response_len": 128}, "rollout.rollout_max_response_len: 128"),
    ({"rollout__rollout_max_response_len": 64, "eval__datasets": {"held": {"path": "prompts.jsonl", "max_response_len": 4096}}},
     "eval.datasets.held.max_response_len: 4096")])  # fmt: skip
def test_a_response_that_fills_the_context_is_refused(tmp_path: Path, own: dict[str, Any], field: str) -> None:
    file = complete(tmp_path, **own)
    (tmp_path / "model" / "config.json").write_text('{"max_position_embeddings": 128}')
    assert f"{field} tokens leave no room for a prompt in the model's context of 128" in problems(file)


def test_sglang_that_is_not_installed_is_named_with_the_way_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = complete(tmp_path, engine__engine="sglang")
    monkeypatch.setattr("slimebus.config.file_checks._sglang_folder", lambda python: None)
    assert "has no package sglang; bin/install-sglang installs it" in problems(file)
    file = complete(tmp_path, engine__engine="sglang", engine__engine_url=["http://127.0.0.1:1"])
    assert not problems(file), "a running engine needs no package here"


@pytest.mark.parametrize(
    ("changes", "is_told"),
    [
        ({}, True),
        ({"rollout__rm_type": "math"}, True),
        ({"data__label_key": "answer"}, False),
        ({"rollout__rm_type": "random"}, False),
        ({"rollout__custom_rm_path": "reward.py:reward"}, False),
        ({"rollout__rm_type": "random", "eval__datasets": {"h": {"path": "unlabelled.jsonl", "rm_type": "exact"}}}, True),
    ],
)
def test_data_without_the_label_that_the_reward_compares_with_is_refused(tmp_path: Path, changes: dict[str, Any], is_told: bool) -> None:
    rows = [{"prompt": "2+2=", "answer": "4"}, {"prompt": "1+1=", "answer": "2", "label": None}]
    file = complete(tmp_path, **{"data__prompt_data": ["unlabelled.jsonl"], **changes})
    (tmp_path / "unlabelled.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert ("no row has the key 'label' (data.label_key)" in problems(file)) == is_told
    if is_told:
        assert "the first has 'prompt', 'answer'" in problems(file)


def test_one_row_with_a_label_is_enough(tmp_path: Path) -> None:
    file = complete(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": "b", "label": 0}\n')
    assert not problems(file)


def test_every_kind_of_mistake_is_told_in_one_round(tmp_path: Path) -> None:
    file = complete(tmp_path, rollout__num_rollout=0, rollout__num_steps_per_rollout=5, data__prompt_data=["absent.jsonl"])
    done = CliRunner().invoke(check, [str(file), "--engine", "none", "--lease-s", "soon"])
    assert isinstance(done.exception, ConfigError)
    for part in ("num_rollout: got 0", "do not divide into", "engine.engine is none", "lease_s: got 'soon'", "absent.jsonl"):
        assert part in done.exception.text, part


@pytest.mark.parametrize("rows", ["[5:9]", "[1:1]", "[-0:-4]"])
def test_a_slice_that_takes_no_row_is_told_with_the_number_of_rows(tmp_path: Path, rows: str) -> None:
    file = complete(tmp_path, data__prompt_data=[f"prompts.jsonl@{rows}"], eval__datasets={"held": {"path": f"prompts.jsonl@{rows}"}})
    told = problems(file)
    assert told.count("takes none of its 1 rows") == 2
    assert "data.prompt_data: prompt data" in told
    assert "eval.datasets.held.path: prompt data" in told


def test_an_entry_that_is_no_path_slice_or_weight_is_told(tmp_path: Path) -> None:
    file = complete(tmp_path, data__prompt_data=["prompts.jsonl@[1:x]", "prompts.jsonl*0"])
    assert "expected PATH, PATH@[start:stop]" in problems(file)
    assert "the weight must be above 0" in problems(file)


@pytest.mark.parametrize(
    ("tensor", "pipeline", "message"),
    [
        (3, 1, "3 ranks cannot share the model's 8 attention heads; expected a divisor"),
        (4, 1, ""),
        (2, 4, "trainer.pipeline_model_parallel_size: 4 ranks cannot share the model's 6 layers"),
        (8, 3, ""),
    ],
)
def test_a_layout_that_the_models_heads_or_layers_cannot_have_is_told(tmp_path: Path, tensor: int, pipeline: int, message: str) -> None:
    sizes = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline, "nproc_per_node": tensor * pipeline}
    file = complete(tmp_path, **{f"trainer__{name}": size for name, size in sizes.items()})
    shape = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 6}
    (tmp_path / "model" / "config.json").write_text(json.dumps(shape))
    assert message in problems(file)
    assert bool(problems(file)) == bool(message)


def test_an_unknown_field_of_megatron_is_told_with_the_nearest(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    found = problems(complete(tmp_path, megatron__recompute_granularty="full"))
    assert "run.yaml:5: megatron.recompute_granularty: no field of Megatron's configs" in found
    assert found.endswith("did you mean 'recompute_granularity'?")


def test_an_unknown_argument_of_sglang_is_told_with_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sglang" / "srt").mkdir(parents=True)
    source = 'class ServerArgs:\n    model_path: str\n    tp_size: int = 1\n\nparser.add_argument("--tensor-parallel-size", "--tp-size")\n'
    (tmp_path / "sglang" / "srt" / "server_args.py").write_text(source)
    monkeypatch.setattr("slimebus.config.file_checks._sglang_folder", lambda python: tmp_path / "sglang")
    file = complete(tmp_path, engine__engine="sglang", sglang__tp_sise=2)
    assert "run.yaml" in problems(file)
    assert "sglang.tp_sise: no argument of the SGLang server; did you mean 'tp_size'?" in problems(file)
    file = complete(tmp_path, engine__engine="sglang", sglang={"tp-size": 2, "tensor_parallel_size": 2})
    assert not problems(file)


def test_arguments_of_server_groups_and_of_the_router_are_checked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (
        ("srt/server_args.py", ""),
        ("srt/arg_groups/fields/all.py", "    tp_size: int\n"),
        ("router_args.py", "    policy: str\n"),
    ):
        (tmp_path / "package" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "package" / name).write_text(text)
    monkeypatch.setattr("slimebus.config.file_checks._package_folder", lambda python, name: tmp_path / "package")
    models = [
        {"name": "actor", "server_groups": [{"num_gpus": 2, "num_gpus_per_engine": 2, "overrides": {"tp_sise": 2}}]},
        {"name": "judge", "model_path": "nowhere", "server_groups": [{"num_gpus": 1}]},
    ]
    (tmp_path / "models.yaml").write_text(yaml.safe_dump({"sglang": models}))
    changes = {"engine__engine": "sglang", "engine__use_router": True, "engine__sglang_config": str(tmp_path / "models.yaml")}
    found = problems(complete(tmp_path, **changes, router={"polisy": "random"}))
    assert "router.polisy: no argument of sglang-router; did you mean 'policy'?" in found
    assert "engine.sglang_config: tp_sise: no argument of the SGLang server; did you mean 'tp_size'?" in found
    assert "tp_size: no argument" not in found
    assert f"engine.sglang_config: no model at {tmp_path / 'nowhere'}" in found


@pytest.mark.parametrize(
    ("field", "hook", "message"),
    [
        ("rollout__custom_rm_path", "def f(a, b): pass", "missing a required argument: 'b'; it is called with (response)"),
        ("rollout__dynamic_sampling_filter_path", "def f(): pass", "too many positional arguments; it is called with (samples)"),
        ("broker__buffer_filter_path", "def f(groups): pass", "too many positional arguments; it is called with (groups, batch)"),
    ],
)
def test_a_hook_that_cannot_be_called_as_it_will_be_is_told(tmp_path: Path, field: str, hook: str, message: str) -> None:
    (tmp_path / "hook.py").write_text(hook + "\n")
    assert message in problems(complete(tmp_path, **{field: "hook.py:f"}))
