"""The hooks on docs/hooks.md run, through the code that runs hooks."""

import asyncio
import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from letters import Letters

from broker.buffer_filter import ReadyGroup, load_plugin
from broker.source import load_source
from broker.state.prompt_source import GroupResult
from broker.state.records import BatchWanted
from rollout.samples.response import Response, Task
from rollout.worker.groups import Dropped, GroupMaker
from slimebus.bus.messages import LeasedGroup
from slimebus.bus.samples import Sample
from slimebus.config import resolve
from slimebus.config.schema import RewardName, sections
from trainer.batches.batch import TrainingGroup
from trainer.objective.build_objective import build_objective

PAGE = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text()
EXAMPLES = dict(re.findall(r"<!-- run: (\w+) -->\n```python\n(.*?)```", PAGE, re.DOTALL))


class Scripted:
    """Engines that answer one task after another with these texts."""

    def __init__(self, *texts: str) -> None:
        self.texts, self.asked = list(texts), []  # type: ignore[var-annotated]

    async def sample(self, tasks: list[Task], begun: list[Response] | None = None) -> list[Response]:
        return [self._response(task, self.texts.pop(0)) for task in tasks]

    def _response(self, task: Task, text: str) -> Response:
        self.asked.append("".join(map(chr, task.prompt_ids)))
        ids = Letters(end=None).encode(text)
        return Response(task=task, token_ids=ids, logprobs=np.zeros(len(ids), np.float32), versions=[(3, len(ids))], text="")


def make(tmp_path: Path, field: str, example: str, engines: Any, num_samples: int, record: Any = None) -> list[Sample]:
    """One group of the record, else of the prompt `2+2=`, label 4, with the example as the hook of this field."""
    (tmp_path / "hook.py").write_text(EXAMPLES[example])
    flag = {f"rollout.{field}": f"hook.py:{example}", "engine.engine": "cpu"}
    resolved = resolve(None, flag, {})
    maker = GroupMaker(resolved.config, tmp_path, Letters(end=None), engines)  # type: ignore[arg-type]
    leased = LeasedGroup(group="0/1", lease=1, num_samples=num_samples, deadline_s=60.0)

    async def run() -> list[Sample]:
        await maker.setup()
        samples = await maker.make_group(leased, msgspec.msgpack.encode(record or {"prompt": "2+2=", "label": "4"}))
        await maker.teardown()
        return samples

    return asyncio.run(run())


def test_the_reward_scores_right_wrong_long_and_cut_off(tmp_path: Path) -> None:
    samples = make(tmp_path, "custom_rm_path", "reward", Scripted("4", "5", "." * 199 + "4"), 3)
    assert [sample.reward for sample in samples] == [1.0, 0.0, pytest.approx(0.8)]


def test_the_group_reward_ranks_by_length_and_gives_advantages(tmp_path: Path) -> None:
    samples = make(tmp_path, "custom_rm_path", "ranked", Scripted("4444", "4", "44"), 3)
    assert [sample.reward for sample in samples] == [0.0, 1.0, 0.5]
    assert [sample.extras["advantages"].tolist() for sample in samples] == [[-0.5], [0.5], [0.0]]


def test_the_generate_hook_tries_again_and_trains_both_turns_but_not_the_hint(tmp_path: Path) -> None:
    engines = Scripted("5", "4")
    (sample,) = make(tmp_path, "custom_generate_function_path", "generate", engines, 1)
    assert engines.asked == ["2+2=", "2+2=5 That is wrong. Again: "]
    assert Letters(end=None).decode(sample.tokens) == "2+2=5 That is wrong. Again: 4"
    assert (sample.reward, sample.turn, np.flatnonzero(sample.loss_mask).tolist()) == (1.0, 1, [4, 28])
    assert sample.versions == [(-1, 4), (3, 1), (-1, 23), (3, 1)]


def test_the_agent_on_the_page_calls_its_tool_and_ends_when_it_is_done(tmp_path: Path) -> None:
    record = {"prompt": [{"role": "user", "content": "2+2"}], "label": "4"}
    engines = Scripted("2+2=", "4")
    (sample,) = make(tmp_path, "custom_generate_function_path", "Agent", engines, 1, record=record)
    assert engines.asked == ["user:2+2;assistant:", "user:2+2;assistant:2+2=;tool:4;assistant:"]
    assert (sample.reward, sample.metadata, int(sample.loss_mask.sum())) == (1.0, {"calls": 1}, 5)


def test_the_class_of_hooks_sees_every_group_counts_and_judges_by_two_tries(tmp_path: Path) -> None:
    (tmp_path / "hook.py").write_text(EXAMPLES["Watch"])
    fields = {"rollout.hooks_path": "hook.py:Watch", "engine.engine": "cpu"}
    engines = Scripted("4", "4 is it", "5", "4")
    maker = GroupMaker(resolve(None, fields, {}).config, tmp_path, Letters(end=None), engines)  # type: ignore[arg-type]
    record = msgspec.msgpack.encode({"prompt": "2+2=", "label": "4"})
    training = LeasedGroup(group="0/1", lease=1, num_samples=2, deadline_s=60.0)
    held = LeasedGroup(group="eval/0", lease=2, num_samples=1, deadline_s=60.0, kind="eval", dataset="held")

    async def run() -> tuple[list[Sample], list[Sample]]:
        await maker.setup()
        made = await maker.make_group(training, record), await maker.make_group(held, record)
        await maker.teardown()
        return made

    trained, evaluated = asyncio.run(run())
    assert [(int(sample.loss_mask.sum()), sample.metadata["words"]) for sample in trained] == [(0, 1), (7, 3)]
    assert [(sample.reward, sample.turn) for sample in evaluated] == [(1.0, 1)]
    assert maker.hooks is not None
    assert maker.hooks.numbers == {"samples_seen": 3, "groups_dropped": 0}


def test_the_filter_keeps_mixed_groups_only(tmp_path: Path) -> None:
    assert len(make(tmp_path, "dynamic_sampling_filter_path", "keep", Scripted("4", "5"), 2)) == 2
    with pytest.raises(Dropped):
        make(tmp_path, "dynamic_sampling_filter_path", "keep", Scripted("4", "4"), 2)


def test_the_buffer_filter_prefers_the_widest_spread(tmp_path: Path) -> None:
    (tmp_path / "hook.py").write_text(EXAMPLES["choose"])
    choose = load_plugin("hook.py:choose", tmp_path)
    assert choose is not None
    shown = [
        ReadyGroup(
            id=str(i),
            admitted=i,
            attempt=1,
            num_samples=8,
            num_tokens=80,
            oldest_version=0,
            staleness=0,
            reward_mean=0.5,
            reward_std=std,
        )
        for i, std in enumerate([0.1, 0.5, 0.0, 0.5])
    ]
    assert choose(shown, BatchWanted(step=0, version=0, num_groups=3, num_tokens=0)) == ["1", "3", "0"]


def test_the_page_names_what_a_buffer_filter_sees() -> None:
    section = PAGE.split("## buffer_filter_path", 1)[1]
    for field in (*ReadyGroup.__struct_fields__, *BatchWanted.__struct_fields__):
        assert f"`{field}`" in section, field


def test_the_source_raises_its_level_when_it_is_mastered_and_remembers_it(tmp_path: Path) -> None:
    (tmp_path / "levels.py").write_text(EXAMPLES["Levels"])
    source = load_source("levels.py:Levels", base=tmp_path, seed=3, rows=None)
    for position in range(40):
        prompt = source.take(position)
        assert prompt is not None
        source.feedback(GroupResult(id=prompt.id, attempt=1, outcome="dropped", reason="filtered", rewards=[1.0] * 8))
    saved = source.saved()
    assert saved is not None
    level = msgspec.msgpack.decode(saved)["level"]
    assert level == 4
    after = load_source("levels.py:Levels", base=tmp_path, seed=3, rows=None)
    after.restore(saved)
    assert [after.take(p) for p in range(40, 50)] == [source.take(p) for p in range(40, 50)]
    levels = [msgspec.msgpack.decode(p.record)["metadata"]["level"] for p in map(after.take, range(50, 80)) if p is not None]
    assert set(levels) == {level - 1, level}


def test_the_page_names_what_a_source_is_told() -> None:
    section = PAGE.split("## source_path", 1)[1]
    for field in GroupResult.__struct_fields__:
        assert f"`{field}`" in section, field


def test_the_algorithm_clips_rewards_and_leaves_out_what_was_cut_off(tmp_path: Path) -> None:
    (tmp_path / "finished.py").write_text(EXAMPLES["Finished"])
    flags = {"algorithm.advantage_estimator": "finished.py:Finished", "rollout.rollout_max_response_len": 3}
    objective = build_objective(resolve(None, flags, {}).config, tmp_path)

    def sample(length: int, reward: float) -> Sample:
        ones = np.ones(length + 1, np.float32)
        return Sample(tokens=ones.astype(np.int32), loss_mask=ones.astype(np.uint8), rollout_logprobs=-ones, versions=[], reward=reward)

    batch = objective.batch_of([TrainingGroup(id="0", samples=[sample(1, 5.0), sample(3, 0.5), sample(2, -1.0)])], 0)
    batch = batch.with_columns(objective.advantages(batch))
    assert batch["advantages"][batch.ends - 1] == pytest.approx(np.array([1, 0, -1]) * 0.5 / (6**-0.5 + 1e-4))
    weights = objective.prepare(batch)["loss_weight"].values
    assert weights.tolist() == pytest.approx([0, 1 / 3, 0, 0, 0, 0, 0, 1 / 3, 1 / 3])


def test_every_hook_of_the_config_has_its_section_and_example() -> None:
    hooks = {doc.name.rpartition(".")[2] for _, _, docs in sections() for doc in docs if doc.unit == "hook"}
    assert hooks == set(re.findall(r"^## (\w+_path)$", PAGE, re.MULTILINE))
    assert len(EXAMPLES) == len(hooks) + 3  # and a group reward, an agent, and one of the trainer's side


def test_built_in_rewards_are_listed() -> None:
    table = PAGE.split("### Built-in rewards", 1)[1].split("\n## ", 1)[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(get_args(RewardName))
