"""A worker's path without a run: held-out sets of a model, one prompt, every hook on an example."""

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from slimebus_command import slimebus
from tiny_model import save_served

from rollout import local
from rollout.engines.pool import EnginePool
from rollout.local import read_prompts
from slimebus.bus.errors import DataError
from slimebus.cli.root import root
from slimebus.client.exported_groups import read_groups
from slimebus.config import resolve


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_served(path)
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [{"prompt": f"{i}+1=", "label": str(i + 1)} for i in range(4)]
    (tmp_path / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return tmp_path / "data.jsonl"


def run_yaml(tmp_path: Path, model: Path, hooks: str = "", **rollout: Any) -> Path:
    (tmp_path / "hooks.py").write_text(hooks)
    held = {"path": "data.jsonl@[1:3]", "n_samples_per_eval_prompt": 2, "max_response_len": 3, "rm_type": "random"}
    config = {
        "model": {"hf_checkpoint": str(model)},
        "data": {"prompt_data": ["data.jsonl"]},
        "rollout": {"rollout_max_response_len": 4, "n_samples_per_prompt": 2, **rollout},
        "eval": {"datasets": {"held": {**held, "sampling": {"top_k": 5}}}},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    return tmp_path / "run.yaml"


@pytest.mark.integration
def test_a_model_is_evaluated_without_a_run(tmp_path: Path, model: Path, data: Path) -> None:
    hook = "async def g(session):\n    if session.task.label == '3': 1 / 0\n    await session.generate()\n"
    done = slimebus("eval", run_yaml(tmp_path, model, hook, custom_generate_function_path="hooks.py:g"), "--model", model, "--json")
    assert done.returncode == 0, done.stderr
    assert "hooks.py:2: ZeroDivisionError" in done.stderr
    (row,) = json.loads(done.stdout)
    assert (row["dataset"], row["num_samples"], row["num_failed"], row["num_done"], set(row["pass_at"])) == ("held", 2, 2, 2, {"1", "2"})
    assert row["low"] <= row["mean_reward"] <= row["high"]


@pytest.mark.integration
def test_one_prompt_goes_the_whole_path(tmp_path: Path, model: Path, data: Path) -> None:
    hook = (
        "async def g(session):\n    await session.generate(max_new_tokens=2)\n    session.observe('!')\n    await session.generate()\n"
        "def r(response):\n    return {'score': 0.5, 'seen': response.label}\ndef keep(samples):\n    return False\n"
    )
    fields = {"custom_generate_function_path": "hooks.py:g", "custom_rm_path": "hooks.py:r", "reward_key": "score"}
    fields |= {"dynamic_sampling_filter_path": "hooks.py:keep"}
    done = slimebus("try", run_yaml(tmp_path, model, hook, **fields), "ab", "--label", "x", "--json")
    assert done.returncode == 0, done.stderr
    (sample,) = json.loads(done.stdout)
    assert (sample["reward"], sample["metadata"]) == (0.5, {"seen": "x"})
    tokens = sample["tokens"]
    assert [token["text"] for token in tokens[:2]] == ["a", "b"]
    assert [token["mask"] for token in tokens] == [0, 0, 1, 1, 0, 1, 1, 1, 1]
    assert all((token["logprob"] < 0) == bool(token["mask"]) for token in tokens)


@pytest.fixture
def check(tmp_path: Path, model: Path, data: Path) -> Iterator[Any]:
    def run(hooks: str, **rollout: Any) -> Result:
        return CliRunner().invoke(root, ["check-hooks", str(run_yaml(tmp_path, model, hooks, **rollout))])

    return run


@pytest.mark.integration
def test_the_first_prompts_are_sampled_without_a_trainer_into_a_folder_of_groups(tmp_path: Path, model: Path, data: Path) -> None:
    hook = "def r(response):\n    if response.task.label == '2': 1 / 0\n    return float(response.task.label)\n"
    run, out = run_yaml(tmp_path, model, hook, custom_rm_path="hooks.py:r", rollout_batch_size=2), tmp_path / "out"
    done = slimebus("sample", run, "--groups", "4", "--out", out)
    assert done.returncode == 0, done.stderr
    assert re.search(r"sample/1 is left out: .*hooks.py:2: ZeroDivisionError", done.stderr)
    assert done.stdout.strip() == f"{out}: 3 groups, 6 samples, mean reward 2.667; 1 groups left out"
    groups = {group.group: group.samples(out) for group in read_groups(out)}
    assert list(groups) == ["sample/0", "sample/2", "sample/3"]
    for sample in (one for samples in groups.values() for one in samples):
        assert sample.versions[-1] == (0, sample.loss_mask.sum())
    steps = [json.loads(line) for line in (out / "batches.jsonl").read_text().splitlines()]
    assert steps == [{"step": 0, "version": 0, "groups": ["sample/0", "sample/2"]}, {"step": 1, "version": 0, "groups": ["sample/3"]}]
    assert "name a folder that does not exist yet" in slimebus("sample", run, "--out", out).stderr


@pytest.fixture
def sampled(tmp_path: Path, model: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What `slimebus sample` says, with demonstrations in place of an engine's samples."""
    monkeypatch.setattr(local, "local_maker", functools.partial(local.local_maker, has_engine=False))

    def run(hook: str, *words: str) -> Result:
        fields = {"custom_generate_function_path": "hooks.py:g", "rm_type": "random", "max_running_groups": 1}
        return CliRunner().invoke(root, ["sample", str(run_yaml(tmp_path, model, hook, **fields)), *words, "--out", str(tmp_path / "out")])

    return run


def test_a_group_that_cannot_be_put_is_left_out_of_those_that_are_sampled(sampled: Any, tmp_path: Path) -> None:
    hook = (
        "def g(session):\n    session.observe('a', is_trained=True)\n"
        "    if session.task.label == '2' and session.task.index: session.extras['x'] = 1\n"
    )
    done = sampled(hook, "--groups", "9")
    assert (done.exit_code, done.exception) == (0, None)
    assert "sample/1 is left out: field 'x' is missing from a sample" in done.output
    assert "data.prompt_data has 4 prompts; --groups 9 asks for more" in done.output
    assert [group.group for group in read_groups(tmp_path / "out")] == ["sample/0", "sample/2", "sample/3"]


def test_without_an_engine_none_is_started(tmp_path: Path, model: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EnginePool, "start", None)
    hook = "async def g(session):\n    if session.task.label == '2': await session.generate()\n    session.observe('a', is_trained=True)\n"
    file = run_yaml(tmp_path, model, hook, custom_generate_function_path="hooks.py:g", rm_type="random")
    done = CliRunner().invoke(root, ["sample", str(file), "--engine", "none", "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.exception
    assert re.search("sample/1 is left out: .*session.generate needs an engine, and engine.engine is none", done.output)
    assert len(list(read_groups(tmp_path / "out"))) == 3


def test_an_interrupted_sampling_keeps_the_groups_that_are_done(sampled: Any, tmp_path: Path) -> None:
    hook = (
        "import asyncio, os, signal\nasync def g(session):\n    session.observe('a', is_trained=True)\n"
        "    if session.task.label == '3':\n        os.kill(os.getpid(), signal.SIGTERM)\n        await asyncio.sleep(60)\n"
    )
    (tmp_path / "out").mkdir()  # left by one that was killed
    done = sampled(hook)
    assert done.exit_code == 1, done.exception
    assert "interrupted: 2 prompts are not sampled" in done.output
    assert [group.group for group in read_groups(tmp_path / "out")] == ["sample/0", "sample/1"]


def test_a_sampling_that_makes_nothing_leaves_nothing(sampled: Any, tmp_path: Path, data: Path) -> None:
    assert sampled("def g(session):\n    1 / 0\n").exit_code == 1
    data.write_text('{"prompt": 3}\n')
    assert "data.jsonl:1: 'prompt' must be text" in str(sampled("def g(session):\n    1 / 0\n").exception)
    assert not (tmp_path / "out").exists()


def test_check_hooks_runs_each_on_one_example(check: Any) -> None:
    hooks = "def r(response):\n    return len(response.text)\ndef keep(samples):\n    return False\n"
    done = check(hooks, custom_rm_path="hooks.py:r", dynamic_sampling_filter_path="hooks.py:keep")
    assert done.exit_code == 0, done.output
    training, evaluation, not_reached = done.output.splitlines()
    assert "any reply but the label" in not_reached
    assert training.startswith("rollout: rewards 1.0, 1.0; the dynamic filter drops the group in ")
    assert evaluation.startswith("eval.datasets.held: rewards ")


@pytest.mark.parametrize(
    ("hooks", "fields", "said"),
    [
        (
            "def r(response):\n    return 1 / 0\n",
            {"custom_rm_path": "hooks.py:r"},
            "reward hooks.py:r failed at .*hooks.py:2: ZeroDivisionError",
        ),
        ("def r(response):\n    return 'good'\n", {"custom_rm_path": "hooks.py:r"}, "reward hooks.py:r gave 'good'"),
        (
            "def g(session):\n    return 5\n",
            {"custom_generate_function_path": "hooks.py:g"},
            "generate hook hooks.py:g gave int",
        ),
        (
            "def r(response):\n    return 1 / response.task.index\n",
            {"custom_rm_path": "hooks.py:r"},
            "reward hooks.py:r failed at .*hooks.py:2: ZeroDivisionError",
        ),
        (
            "class H:\n    def is_trained(self, sample):\n        return sample.nothing\n",
            {"hooks_path": "hooks.py:H"},
            "hooks hooks.py:H.is_trained failed at .*hooks.py:3: AttributeError",
        ),
        ("class H:\n    def log(self):\n        return {'a': 'b'}\n", {"hooks_path": "hooks.py:H"}, "hooks hooks.py:H.log gave .*'b'"),
        ("def keep(samples):\n    return samples[9]\n", {"dynamic_sampling_filter_path": "hooks.py:keep"}, "dynamic filter .* IndexError"),
    ],
)
def test_check_hooks_names_the_one_that_fails(check: Any, hooks: str, fields: dict[str, str], said: str) -> None:
    done = check(hooks, **fields)
    assert done.exit_code == 1, done.exception
    assert re.search(rf"rollout: {said}", done.output), done.output


def test_held_out_prompts_may_be_parquet(tmp_path: Path, model: Path, data: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    parquet.write_table(pytest.importorskip("pyarrow").Table.from_pylist(rows), tmp_path / "data.parquet")
    resolved = resolve(run_yaml(tmp_path, model))
    assert list(read_prompts(resolved, "data.parquet@[1:3]")) == list(read_prompts(resolved, "data.jsonl@[1:3]"))


def test_a_malformed_prompt_is_told_with_file_and_line(tmp_path: Path, model: Path, data: Path) -> None:
    data.write_text('{"prompt": "a"}\n\n{"prompt": 3}\n')
    resolved = resolve(run_yaml(tmp_path, model))
    with pytest.raises(DataError, match=rf"{data}:3: 'prompt' "):
        list(read_prompts(resolved, "data.jsonl"))
