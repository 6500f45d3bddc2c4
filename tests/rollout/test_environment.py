"""Environments of verifiers as they are: their tasks are prompts, their agents' runs samples, their rubric the reward."""

import asyncio
import importlib.metadata
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from letters import Letters
from talk import Policy

from broker.source import FileRows
from rollout.samples.plugins import PluginError
from rollout.worker.groups import GroupMaker
from slimebus.bus.errors import ConfigError, Unreachable
from slimebus.bus.messages import LeasedGroup
from slimebus.bus.samples import Sample
from slimebus.config import resolve
from slimebus.prompts.verifiers_tasks import load, tasks_of

pytest.importorskip("verifiers")
FOLDER = Path(__file__).parents[1] / "fixtures" / "environment"


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run's folder, in which nothing of verifiers outside of it is found or left."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", "")  # set by the worker for servers of tools, which are processes of their own
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "tools.toml").write_text('[env.taskset]\nid = "sums"\nhas_tool = true\nnum_tasks = 3\n')
    return tmp_path


def rows_of(base: Path, entry: str = "environment", name: str = "sums") -> list[dict[str, Any]]:
    resolved = resolve(None, {"rollout.environment": name}, {})
    rows = FileRows([str(base / entry)], keys=resolved.prompt_keys)
    return [msgspec.msgpack.decode(rows.record(row)) for row in range(len(rows))]


def make(base: Path, policy: Any, row: int, name: str = "sums") -> list[Sample]:
    """A group of one sample of this task."""
    resolved = resolve(None, {"rollout.environment": name, "engine.engine": "cpu"}, {})
    maker = GroupMaker(resolved.config, base, Letters(), policy)  # type: ignore[arg-type]
    record = msgspec.msgpack.encode(rows_of(base, name=name)[row])

    async def run() -> list[Sample]:
        await maker.setup()
        try:
            return await maker.make_group(LeasedGroup(group="0/1", lease=1, num_samples=1, deadline_s=60.0, sampling={}), record)
        finally:
            await maker.teardown()

    return asyncio.run(run())


def test_tasks_are_prompts_a_slice_of_them_too_and_are_known_again(base: Path) -> None:
    rows = rows_of(base)
    assert rows[3]["prompt"] == [{"role": "user", "content": "3+3"}]
    assert [row["prompt"][0]["content"] for row in rows_of(base, "environment@[38:]")] == ["38+38", "39+39"]
    verifiers, config, select = load("sums", base)
    assert [row["metadata"]["task"] for row in rows] == list(tasks_of(verifiers.load_taskset(config.taskset), select))


def test_tasks_without_an_end_need_a_limit(base: Path) -> None:
    endless = "class Endless(Sums):\n    INFINITE = True\n    def load(self):\n        yield from super().load()\n"
    (base / "endless.py").write_text(f"from sums import Sums\n__all__ = ['Endless']\n{endless}        raise OSError('no end')\n")
    with pytest.raises(ConfigError, match="its tasks have no end; name a TOML file that has a `limit` of them"):
        rows_of(base, name="endless")
    (base / "some.toml").write_text('[env.taskset]\nid = "endless"\n[select]\nskip = 2\nlimit = 3\n')
    assert [row["prompt"][0]["content"] for row in rows_of(base, name="some.toml")] == ["2+2", "3+3", "4+4"]


@pytest.mark.parametrize(
    ("name", "load", "said"),
    [
        ("raises", "raise RuntimeError('no data here')", "RuntimeError: no data here"),
        ("exits", "raise SystemExit(3)", "SystemExit: 3"),
        ("gives_none", "return None", "TypeError"),
        ("gives_numbers", "return [1]", "AttributeError"),
        ("surrogate", "return [vf.Task(vf.TaskData(idx=0, prompt='\\ud800'))]", "(Unicode|surrogate|Validation)"),
    ],
)
def test_a_taskset_that_fails_is_named(base: Path, monkeypatch: pytest.MonkeyPatch, name: str, load: str, said: str) -> None:
    body = f"class Mine(vf.Taskset[vf.Task, vf.TasksetConfig]):\n    def load(self):\n        {load}\n"
    (base / f"{name}.py").write_text(f"import verifiers.v1 as vf\n__all__ = ['Mine']\n{body}")
    with pytest.raises(ConfigError, match=rf"environment {name} cannot be read: {said}"):
        rows_of(base, name=name)


def test_without_other_prompts_the_tasks_are_those_of_the_run() -> None:
    assert resolve(None, {"rollout.environment": "sums"}, {}).config.data.prompt_data == ["environment"]
    assert resolve(None, {"rollout.environment": "sums", "data.prompt_data": ["a.jsonl"]}, {}).config.data.prompt_data == ["a.jsonl"]


def test_an_episode_is_a_sample_as_it_was_sampled_with_the_rubrics_reward(base: Path) -> None:
    policy = Policy("4")
    (sample,) = make(base, policy, 2)
    assert policy.seen == ["user:2+2;assistant:"]
    assert sample.tokens[sample.loss_mask == 1].tolist() == policy.sampled
    assert sample.reward == 0.5 + 1 / 32
    assert sample.metadata == {"is_right": 0.5, "digits": 1 / 32, "turns": 1.0}


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore:The 'initial' parameter:DeprecationWarning")  # the library's own call of tenacity
def test_its_tools_are_called_by_the_policy(base: Path) -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 2}}</tool_call>'
    policy = Policy(call, '<tool_call>{"name": "none"}</tool_call>', "4")
    (sample,) = make(base, policy, 2, "tools.toml")
    assert "'The sum.'" in policy.seen[0]
    assert policy.seen[1].endswith(f"{call};tool:4;assistant:")
    assert policy.seen[2].endswith("tool:error: KeyError('none');assistant:")
    assert sample.tokens[sample.loss_mask == 1].tolist() == policy.sampled
    assert (sample.reward, sample.turn) == (0.5 + 1 / 32, 2)


def test_what_a_rubric_raises_is_an_error_of_the_group_that_names_the_environment(base: Path) -> None:
    with pytest.raises(PluginError, match=r"environment sums failed: .*no rubric for this one"):
        make(base, Policy("0"), 0)


def test_a_prompt_of_another_source_is_refused(base: Path) -> None:
    resolved = resolve(None, {"rollout.environment": "sums", "engine.engine": "cpu"}, {})
    maker = GroupMaker(resolved.config, base, Letters(), Policy("4"))  # type: ignore[arg-type]

    async def run() -> None:
        await maker.setup()
        try:
            await maker.make_group(
                LeasedGroup(group="0/1", lease=1, num_samples=1, deadline_s=60.0), msgspec.msgpack.encode({"prompt": "2+2"})
            )
        finally:
            await maker.teardown()

    with pytest.raises(PluginError, match="the prompt is no task of environment sums"):
        asyncio.run(run())


@pytest.mark.parametrize(
    ("name", "installed", "said"),
    [
        ("sums", "0.1.9", r"needs verifiers 0.4.0, and here is 0.1.9; pip install 'slimebus\[verifiers\]'"),
        ("no_such", "", "no_such cannot be loaded: there is no module no_such; .*, installed or beside the run.yaml, .*__all__"),
        ("needy", "", "needy cannot be loaded: there is no module no_such_library; "),
        ("bare", "", "bare cannot be loaded: .* must export its Taskset subclass via `__all__`"),
        ("none.toml", "", "none.toml cannot be loaded: FileNotFoundError"),
    ],
)
def test_what_is_missing_is_told_with_its_remedy(base: Path, name: str, installed: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (base / "needy.py").write_text("import no_such_library\n")
    (base / "bare.py").write_text("tasks = []\n")
    monkeypatch.syspath_prepend(str(base))
    if installed:
        monkeypatch.setattr(importlib.metadata, "distributions", lambda name: [SimpleNamespace(version=installed)])
    with pytest.raises(ConfigError, match=said):
        load(name, base)


def test_a_folder_may_be_called_environment(base: Path) -> None:
    (base / "environment").write_text(json.dumps({"prompt": "a"}) + "\n")
    assert [row["prompt"] for row in rows_of(base)] == ["a"]


def test_each_run_of_a_trained_agent_is_a_sample_with_a_reward_of_its_own(base: Path) -> None:
    policy = Policy("a", "b", "10")
    first, second = make(base, policy, 2, "duel")
    assert policy.seen == ["user:2+2;assistant:", "system:again;user:2+2;assistant:", "user:2+2;assistant:"]
    assert [Letters().decode(sample.tokens[sample.loss_mask == 1]) for sample in (first, second)] == ["a", "b"]
    assert (first.reward, second.reward) == (10.0, 20.0)
    assert first.trajectory == second.trajectory


def test_what_an_engine_raises_is_the_engines(base: Path) -> None:
    class Gone:
        async def sample(self, tasks: Any, begun: Any = None) -> Any:
            raise Unreachable("no engine")

    with pytest.raises(Unreachable, match="no engine"):
        make(base, Gone(), 2)
