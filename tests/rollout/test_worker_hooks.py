"""The class of rollout.hooks_path: what is checked at the start, and what it may change."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from letters import Letters
from talk import Policy

from rollout.groups import Dropped, GroupMaker
from rollout.plugins import PluginError
from rollout.worker_hooks import WorkerHooks
from slimebus.bus.errors import HookError
from slimebus.bus.messages import LeasedGroup
from slimebus.bus.samples import Sample
from slimebus.cli.config import resolve


def make(folder: Path, hooks: str, **fields: str) -> tuple[GroupMaker, list[Sample]]:
    """A training group of one sample under this class."""
    (folder / "mine.py").write_text(hooks)
    flags = {"rollout.hooks_path": "mine.py:Mine", "engine.engine": "cpu"} | {f"rollout.{name}": value for name, value in fields.items()}
    maker = GroupMaker(resolve(None, flags, {}).config, folder, Letters(), Policy("ab"))  # type: ignore[arg-type]
    leased = LeasedGroup(group="0/1", lease=1, num_samples=1, deadline_s=60.0)
    try:
        return maker, asyncio.run(maker.make(leased, msgspec.msgpack.encode({"prompt": "q", "label": "ab"})))
    except Dropped:
        return maker, []


@pytest.mark.parametrize(
    ("hooks", "said"),
    [
        ("class Mine:\n    pass\n", "the class has none of after_generate, is_trained, on_group, log, evaluate"),
        (
            "class Mine:\n    def on_group(self, samples):\n        pass\n",
            r"on_group: too many .*called with \(samples, is_kept, dataset\)",
        ),
        ("class Mine:\n    def __init__(self, a):\n        pass\n", "could not be made without arguments"),
    ],
)
def test_a_class_that_cannot_be_used_is_found_at_the_start(tmp_path: Path, hooks: str, said: str) -> None:
    (tmp_path / "mine.py").write_text(hooks)
    with pytest.raises(HookError, match=said):
        WorkerHooks("mine.py:Mine", tmp_path, 1.0)


def test_what_it_changes_in_a_response_is_checked_and_rewarded(tmp_path: Path) -> None:
    better = "class Mine:\n    def after_generate(self, response):\n        response.text = 'x'\n"
    _, (sample,) = make(tmp_path, better)
    assert sample.reward == 0.0
    broken = "class Mine:\n    async def after_generate(self, response):\n        response.loss_mask = [1]\n"
    (tmp_path / "two").mkdir()
    with pytest.raises(PluginError, match=r"hooks mine.py:Mine gave a Response that cannot be used: loss_mask has 1 entries"):
        make(tmp_path / "two", broken)


def test_a_dropped_group_is_shown_too_and_copies_alone_are_given(tmp_path: Path) -> None:
    hooks = (
        "class Mine:\n    def on_group(self, samples, is_kept, dataset):\n        self.kept = is_kept\n        samples[0].reward = 9.0\n"
        "    def log(self):\n        return {'kept': float(self.kept)}\ndef keep(samples):\n    return False\n"
    )
    maker, samples = make(tmp_path, hooks, dynamic_sampling_filter_path="mine.py:keep")
    assert maker.hooks is not None
    assert (samples, maker.hooks.numbers) == ([], {"kept": 0.0})
    (tmp_path / "two").mkdir()
    maker, (sample,) = make(tmp_path / "two", hooks)
    assert maker.hooks is not None
    assert (sample.reward, maker.hooks.numbers) == (1.0, {"kept": 1.0})
