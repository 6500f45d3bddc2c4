from pathlib import Path

import pytest

from slimebus.config import resolve
from slimebus.config.fields import docstrings, sections
from slimebus.config.schema import paths
from slimebus.errors import ConfigError


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    return file


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
        ("rollout_batch_size: 3\n", "run.yaml:1: unknown key 'rollout_batch_size'; did you mean 'rollout.rollout_batch_size'?"),
        ("rollout:\n  num_rollout: many\n", "run.yaml:2: rollout.num_rollout: Expected `int`, got `str`"),
        ("rollout:\n  num_rollout: 0\n", "run.yaml:2: rollout.num_rollout: Expected `int` >= 1"),
        ("broker:\n  durability: disk\n", "run.yaml:2: broker.durability: Invalid enum value 'disk'"),
        ("rollout: 3\n", "run.yaml:1: rollout is a section"),
        ("- a\n", "expected a map of sections"),
        ("a: [\n", "not YAML"),
        (
            "eval:\n  datasets:\n    h: {path: x, temprature: 1}\n",
            "unknown key 'temprature' of an eval dataset; did you mean 'temperature'?",
        ),
        ("broker:\n  max_staleness: 1.5\n", "broker.max_staleness: 1.5; expected a whole number"),
        ("rollout:\n  global_batch_size: 100\n", "= 256 must equal global_batch_size 100 x num_steps_per_rollout 1 = 100"),
        ("rollout:\n  num_steps_per_rollout: 5\n", "32 groups do not divide into num_steps_per_rollout 5 parts"),
        (
            "trainer:\n  nproc_per_node: 3\n  tensor_model_parallel_size: 2\n",
            "3 is no multiple of tensor 2 x pipeline 1 x context 1 = 2 ranks",
        ),
        ("rollout:\n  rollout_batch_size: 5\n  n_samples_per_prompt: 1\ntrainer:\n  nproc_per_node: 2\n", "5 samples do not divide over 2"),
        ("engine:\n  engine: none\n", "custom_generate_function_path must make the samples"),
        ("algorithm:\n  use_tis: true\n", "use_tis needs recomputed old logprobs"),
        ("eval:\n  eval_interval: 3\n", "eval.datasets is empty"),
    ],
)
def test_a_mistake_names_its_place_and_the_remedy(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(write(tmp_path, text), environ={})
    assert message in caught.value.text
    assert "\n" not in caught.value.text


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
    assert all(doc.startswith("[") for doc in docstrings().values())


def test_flags_are_unambiguous_across_sections() -> None:
    last = [name.rpartition(".")[2] for name in paths()]
    assert len(last) == len(set(last))
