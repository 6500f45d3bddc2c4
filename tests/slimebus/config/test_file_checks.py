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


Look = tuple[dict[str, bytes | None], dict[str, Any], str]
"""Files in place of those of a complete run (None: without it), changes of its config, and what is told; nothing: it is right."""
UNLABELLED = {"unlabelled.jsonl": b'{"prompt": "2+2=", "answer": "4"}\n{"prompt": "1+1=", "answer": "2", "label": null}\n'}
NO_LABEL = "no row has the key 'label' (data.label_key), which the reward compares with; the first has 'prompt', 'answer'"
SHAPE = {"model/config.json": b'{"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 6}'}
LONG = {"model/config.json": b'{"max_position_embeddings": 128}'}
NO_ROOM = "tokens leave no room for a prompt in the model's context of 128"
OWN_REWARD = {"rollout__custom_rm_path": "reward.py:reward"}


def of_file(name: str, content: bytes, message: str, **changes: Any) -> Look:
    return {name: content}, {"data__prompt_data": [name], **OWN_REWARD, **changes}, message


def unlabelled(message: str, **changes: Any) -> Look:
    return UNLABELLED, {"data__prompt_data": ["unlabelled.jsonl"], **changes}, message


def laid_out(tensor: int, pipeline: int, message: str) -> Look:
    sizes = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline, "nproc_per_node": tensor * pipeline}
    return SHAPE, {f"trainer__{name}": size for name, size in sizes.items()}, message


def sliced(rows: str, message: str) -> Look:
    file = f"prompts.jsonl@{rows}"
    return {}, {"data__prompt_data": [file], "eval__datasets": {"held": {"path": file}}}, message


LOOKED_AT: dict[str, Look] = {
    "no tokenizer": ({"model/tokenizer.json": None}, {}, "no tokenizer (tokenizer.json or tokenizer_config.json)"),
    "no weights": ({"model/model.safetensors": None}, {}, "no weights (*.safetensors)"),
    "whole weights": ({"model/model.safetensors": weights(8, 8)}, {}, ""),
    "weights cut short": ({"model/model.safetensors": weights(8, 7)}, {}, "model.safetensors is cut short: it has 1"),
    "a header cut short": ({"model/model.safetensors": weights(8, 8)[:20]}, {}, "its header cannot be read"),
    "empty weights": ({"model/model.safetensors": b""}, {}, "its header cannot be read"),
    "a pointer of git-lfs": ({"model/model.safetensors": b"version https://git-lfs.github.com/spec/v1"}, {}, "its header cannot be read"),
    "a shard that is not there": (
        {"model/model.safetensors.index.json": b'{"weight_map": {"w": "model-00002.safetensors"}}'},
        {},
        "model-00002.safetensors: no such file, which model.safetensors.index.json names",
    ),
    "a response that fills the context": (
        LONG,
        {"rollout__rollout_max_response_len": 128},
        f"rollout.rollout_max_response_len: 128 {NO_ROOM}",
    ),
    "one of an evaluation that does": (
        LONG,
        {"rollout__rollout_max_response_len": 64, "eval__datasets": {"held": {"path": "prompts.jsonl", "max_response_len": 4096}}},
        f"eval.datasets.held.max_response_len: 4096 {NO_ROOM}",
    ),
    "no prompt": of_file("p.jsonl", b'\n{"question": "2+2", "label": "4"}\n', "p.jsonl:2: no 'prompt' (input_key); it has 'question'"),
    "no prompt, skipped": of_file("p.jsonl", b'{"question": "2+2"}\n', "", data__skip_bad_prompts=True),
    "half a line": of_file("p.jsonl", b'{"prompt": "2+2", \n', "p.jsonl:1: "),
    "no line": of_file("p.jsonl", b"\n \n", "no prompts in "),
    "an empty prompt": of_file("p.jsonl.gz", gzip.compress(b'{"prompt": ""}\n'), "p.jsonl.gz:1: 'prompt' must be text"),
    "no parquet": of_file("p.parquet", b"PAR1 and nothing behind it", "cannot be read as parquet"),
    "a slice behind a bad line": of_file("p.jsonl", b'{"comment": 1}\n{"prompt": "2+2"}\n', "", data__prompt_data=["p.jsonl@[1:]"]),
    "a slice of no row": sliced("[5:9]", "data.prompt_data: prompt data "),
    "an empty slice": sliced("[1:1]", "eval.datasets.held.path: prompt data "),
    "a slice backwards": sliced("[-0:-4]", "takes none of its 1 rows"),
    "no slice": ({}, {"data__prompt_data": ["prompts.jsonl@[1:x]"]}, "expected PATH, PATH@[start:stop]"),
    "no weight": ({}, {"data__prompt_data": ["prompts.jsonl*0"]}, "the weight must be above 0"),
    "no label": unlabelled(NO_LABEL),
    "no label for math": unlabelled(NO_LABEL, rollout__rm_type="math"),
    "another label": unlabelled("", data__label_key="answer"),
    "a reward without labels": unlabelled("", rollout__rm_type="random"),
    "a reward of one's own": unlabelled("", **OWN_REWARD),
    "no label for an evaluation": unlabelled(
        NO_LABEL, rollout__rm_type="random", eval__datasets={"h": {"path": "unlabelled.jsonl", "rm_type": "exact"}}
    ),
    "one row with a label": ({"prompts.jsonl": b'{"prompt": "a"}\n\n{"prompt": "b", "label": 0}\n'}, {}, ""),
    "ranks that share no heads": laid_out(3, 1, "3 ranks cannot share the model's 8 attention heads; expected a divisor"),
    "ranks that share heads": laid_out(4, 1, ""),
    "ranks that share no layers": laid_out(2, 4, "trainer.pipeline_model_parallel_size: 4 ranks cannot share the model's 6 layers"),
    "ranks that share layers": laid_out(8, 3, ""),
    "a hook of two": (
        {"hook.py": b"def f(a, b): pass\n"},
        {"rollout__custom_rm_path": "hook.py:f"},
        "missing a required argument: 'b'; it is called with (response)",
    ),
    "a hook of none": (
        {"hook.py": b"def f(): pass\n"},
        {"rollout__dynamic_sampling_filter_path": "hook.py:f"},
        "too many positional arguments; it is called with (samples)",
    ),
    "a hook of one": (
        {"hook.py": b"def f(groups): pass\n"},
        {"broker__buffer_filter_path": "hook.py:f"},
        "too many positional arguments; it is called with (groups, batch)",
    ),
}


@pytest.mark.parametrize("what", LOOKED_AT)
def test_what_a_config_names_is_looked_at(tmp_path: Path, what: str) -> None:
    files, changes, message = LOOKED_AT[what]
    if what == "no parquet":
        pytest.importorskip("pyarrow")
    file = complete(tmp_path, **changes)
    for name, content in files.items():
        (tmp_path / name).unlink() if content is None else (tmp_path / name).write_bytes(content)
    told = problems(file)
    assert message in told
    assert bool(told) == bool(message)


def test_sglang_that_is_not_installed_is_named_with_the_way_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = complete(tmp_path, engine__engine="sglang")
    monkeypatch.setattr("slimebus.config.file_checks._sglang_folder", lambda python: None)
    assert "has no package sglang; bin/install-sglang installs it" in problems(file)
    file = complete(tmp_path, engine__engine="sglang", engine__engine_url=["http://127.0.0.1:1"])
    assert not problems(file), "a running engine needs no package here"


def test_every_kind_of_mistake_is_told_in_one_round(tmp_path: Path) -> None:
    file = complete(tmp_path, rollout__num_rollout=0, rollout__num_steps_per_rollout=5, data__prompt_data=["absent.jsonl"])
    done = CliRunner().invoke(check, [str(file), "--engine", "none", "--lease-s", "soon"])
    assert isinstance(done.exception, ConfigError)
    for part in ("num_rollout: got 0", "do not divide into", "engine.engine is none", "lease_s: got 'soon'", "absent.jsonl"):
        assert part in done.exception.text, part


def test_an_unknown_field_of_megatron_is_told_with_the_nearest(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    found = problems(complete(tmp_path, megatron__recompute_granularty="full"))
    assert "run.yaml:5: megatron.recompute_granularty: no field of Megatron's configs" in found
    assert found.endswith("did you mean 'recompute_granularity'?")


def test_unknown_arguments_of_sglang_and_of_the_router_are_told_with_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (
        ("srt/server_args.py", 'class ServerArgs:\n    model_path: str\n\nparser.add_argument("--tensor-parallel-size", "--tp-size")\n'),
        ("srt/arg_groups/fields/all.py", "    tp_size: int\n    mem_fraction: float\n"),
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
    sglang = {"mem-fraktion": 0.5, "tp-size": 2, "tensor_parallel_size": 2}
    found = problems(complete(tmp_path, **changes, router={"polisy": "random"}, sglang=sglang))
    assert "router.polisy: no argument of sglang-router; did you mean 'policy'?" in found
    assert "engine.sglang_config: tp_sise: no argument of the SGLang server; did you mean 'tp_size'?" in found
    assert "sglang.mem-fraktion: no argument of the SGLang server; did you mean 'mem_fraction'?" in found
    assert (found.count("no argument of the SGLang server"), found.count("run.yaml")) == (2, 2), "what is of the file has its place"
    assert f"engine.sglang_config: no model at {tmp_path / 'nowhere'}" in found
