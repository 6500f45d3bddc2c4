import re
from pathlib import Path

import msgspec
import pytest

from slimebus.bus.errors import ConfigError
from slimebus.config import resolve, schema
from slimebus.config.schema import docstrings, flag_of, paths, sections


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    return file


@pytest.mark.parametrize("number", ["9007199254740993", str(2**63), str(2**200)])
def test_every_whole_number_has_an_upper_limit(number: str) -> None:
    whole = [name for name, field in paths().items() if isinstance(msgspec.inspect.type_info(field.type), msgspec.inspect.IntType)]
    assert len(whole) > 25
    with pytest.raises(ConfigError) as refused:
        resolve(None, dict.fromkeys([*whole, "rollout.rollout_stop_token_ids"], number), {})
    for name in whole:
        assert re.search(rf"{name}: got .{number[:50]}.*; expected a whole number >= -?\d and <= \d+$", refused.value.text, re.M), name
    assert "rollout.rollout_stop_token_ids: got" in refused.value.text


@pytest.mark.parametrize("seconds", ["1e10", "1e300"])
def test_no_wait_is_longer_than_a_thread_can_wait(seconds: str) -> None:
    with pytest.raises(ConfigError, match=r"broker.lease_s: got .*; expected a number > 0 and <= 1"):
        resolve(None, {"broker.lease_s": seconds}, {})


def test_flag_beats_file_beats_environment_beats_default(tmp_path: Path) -> None:
    file = write(tmp_path, "broker:\n  lease_s: 7\nrollout:\n  num_rollout: 5\n")
    environ = {"SLIMEBUS_BROKER_LEASE_S": "9", "SLIMEBUS_SEED": "4"}
    resolved = resolve(file, {"rollout.num_rollout": "6"}, environ)
    assert (resolved.config.broker.lease_s, resolved.config.rollout.num_rollout, resolved.config.seed) == (7, 6, 4)
    assert resolved.origin["broker.lease_s"] == f"{file}:2"
    assert resolved.origin["rollout.num_rollout"] == "--num-rollout"
    assert resolved.origin["seed"] == "SLIMEBUS_SEED"
    assert "optimizer.lr" not in resolved.origin


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("broker:\n  max_stalenes: 2\n", "run.yaml:2: unknown key 'broker.max_stalenes'; did you mean 'broker.max_staleness'?"),
        ("optimizer:\n  weight_decay: 0.1\n", "; other fields of Megatron's configs, such as weight_decay, go under megatron"),
        ("algorithm:\n  eps_clip: 0.1\n", "; what belongs to an algorithm or correction goes under algorithm.settings"),
        ("rollout_batch_size: 3\n", "run.yaml:1: unknown key 'rollout_batch_size'; did you mean 'rollout.rollout_batch_size'?"),
        ("rollout:\n  num_rollout: many\n", "run.yaml:2: rollout.num_rollout: got 'many'; expected a whole number >= 1"),
        ("rollout:\n  num_rollout: 0\n", "run.yaml:2: rollout.num_rollout: got 0; expected a whole number >= 1"),
        ("broker:\n  durability: disk\n", "run.yaml:2: broker.durability: got 'disk'; expected one of fsync, os, memory"),
        ("rollout: 3\n", "run.yaml:1: rollout: got 3; expected a map of its fields"),
        ("- a\n", "expected a map of sections"),
        ("megatron: {7: 8}\n", "run.yaml:1: megatron: got a map; expected a map, with texts for keys"),
        ("a: [\n", "not YAML"),
        (
            "eval:\n  datasets:\n    h: {path: x, temprature: 1}\n",
            "run.yaml:3: unknown key 'eval.datasets.h.temprature'; did you mean 'eval.datasets.h.temperature'?",
        ),
        ("broker:\n  max_staleness: 1.5\n", "broker.max_staleness: 1.5; expected a whole number"),
        ("rollout:\n  num_steps_per_rollout: 5\n", "32 groups do not divide into num_steps_per_rollout 5 parts"),
        (
            "trainer:\n  nproc_per_node: 3\n  tensor_model_parallel_size: 2\n",
            "3 is no multiple of tensor 2 x pipeline 1 x context 1 = 2 ranks",
        ),
        ("trainer:\n  sequence_parallel: true\n", "true with tensor_model_parallel_size 1; raise the size or turn it off"),
        ("data:\n  prompt_data: a.jsonl\n", "run.yaml:2: data.prompt_data: got 'a.jsonl'; expected a list of texts, such as [a, b]"),
        ('engine:\n  sglang_config: "a\\0b"\n', "run.yaml:2: engine.sglang_config: got 'a\\x00b'; expected text"),
        ('data:\n  prompt_data: ["a\\0b"]\n', "run.yaml:2: data.prompt_data: got ['a\\x00b']; expected a list of texts"),
        ('run_dir: "a\\udcff"\n', "run.yaml:1: run_dir: got 'a\\udcff'; expected text"),
        ("name:\n\trun: 3\n", "run.yaml:2: a tab; YAML is indented with spaces only"),
        ("broker:\n  max_staleness: .nan\n", "broker.max_staleness: got nan; expected a number >= 0"),
        ("broker:\n  lease_s: .inf\n", "broker.lease_s: got inf; expected a number > 0"),
        ("a: " + "[" * 5000 + "]" * 5000, "run.yaml: nested too deeply; expected a map of sections"),
        ("eval: &here {datasets: *here}\n", "run.yaml: nested too deeply; expected a map of sections"),
        ('trainer: {save_interval: "\\udc80"}\n', "trainer.save_interval: got '\\udc80'; expected a whole number"),
        ("name: ../../x\n", "name: '../../x'; expected 1 to 64 letters"),
        ("name: 3\n", "name: got 3; expected text (in quotes"),
        ("seed:\n", "run.yaml:1: seed: got nothing; expected a whole number >= 0"),
        ("seed: 1\nseed: 2\n", "run.yaml:2: seed is given twice"),
        ("rollout:\n  rm_type: exakt\n", "rollout.rm_type: got 'exakt'; expected one of exact, math, dapo"),
        ("eval:\n  datasets: {h: x.jsonl}\n", "eval.datasets.h: got 'x.jsonl'; expected a map of its fields"),
        ("eval:\n  datasets: {h: {rm_type: exact}}\n", "eval.datasets.h.path is not set"),
        (
            "eval:\n  datasets: {h: {path: x, sampling: {top_q: 1}}}\n",
            "eval.datasets.h.sampling: no sampling parameter 'top_q'; expected one of",
        ),
        (
            "rollout:\n  rollout_batch_size: 5\n  n_samples_per_prompt: 3\ntrainer:\n  nproc_per_node: 2\n",
            "15 samples do not divide over 2",
        ),
        ("engine:\n  engine: none\n", "custom_generate_function_path must make the samples"),
        ("eval:\n  eval_interval: 3\n", "eval.datasets is empty"),
    ],
)
def test_a_mistake_names_its_place_and_the_remedy(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(write(tmp_path, text), environ={})
    assert message in caught.value.text
    assert "\n" not in caught.value.text


def test_every_mistake_is_told_at_once_each_with_its_place(tmp_path: Path) -> None:
    text = "seeed: 1\nbroker:\n  durability: disk\n  max_stalenes: 3\nrollout: {num_rollout: 0, n_samples_per_prompt: x}\n"
    with pytest.raises(ConfigError) as caught:
        resolve(write(tmp_path, text), {"optimizer.lr": "fast"}, {"SLIMEBUS_TRAINER_TRAIN_THREADS": "none"})
    first, *told = caught.value.text.splitlines()
    assert first == "7 mistakes:"
    names = ("seeed", "durability", "max_stalenes", "num_rollout", "n_samples_per_prompt", "--lr: optimizer.lr", "train_threads")
    assert all(any(name in line for line in told) for name in names)


def test_a_rule_about_a_value_that_is_broken_itself_is_not_told_beside_it(tmp_path: Path) -> None:
    text = "rollout: {rollout_batch_size: many, num_steps_per_rollout: 5}\neval: {eval_interval: 1}\n"
    with pytest.raises(ConfigError, match="2 mistakes:") as caught:
        resolve(write(tmp_path, text), environ={})
    assert "rollout.rollout_batch_size: got 'many'" in caught.value.text
    assert "eval.datasets is empty" in caught.value.text


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file; `slimebus init`"):
        resolve(tmp_path / "absent.yaml", environ={})


def test_unbounded_staleness_and_lists_from_flags_are_understood() -> None:
    resolved = resolve(None, {"broker.max_staleness": "inf", "data.prompt_data": "a.jsonl,b.jsonl"}, {})
    assert resolved.config.broker.max_staleness == float("inf")
    assert resolved.config.data.prompt_data == ["a.jsonl", "b.jsonl"]


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    resolved = resolve(write(tmp_path, "name: x\n"), environ={})
    assert resolved.path("model") == tmp_path / "model"
    assert resolved.path("/abs") == Path("/abs")


def test_every_field_is_documented_with_its_unit() -> None:
    undocumented = [d.name for _, _, docs in sections() for d in docs if not d.unit or not d.meaning.endswith((".", ")"))]
    assert not undocumented
    assert all(doc.startswith("[") for doc in docstrings(schema).values())


def test_flags_are_unambiguous_across_sections() -> None:
    flags = [flag_of(name) for name in paths()]
    assert len(flags) == len(set(flags))
    assert {"engine-gpus", "trainer-gpus", "num-engines"} <= set(flags)
