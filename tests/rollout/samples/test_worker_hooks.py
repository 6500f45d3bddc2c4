"""The class of rollout.hooks_path: what is checked at the start, and what it may change."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from letters import Letters
from talk import Policy

from rollout.samples.plugins import PluginError
from rollout.samples.worker_hooks import WorkerHooks
from rollout.worker.attempts import Counts
from rollout.worker.groups import Dropped, GroupMaker
from rollout.worker.worker import Worker
from slimebus.bus.errors import HookError
from slimebus.bus.messages import LeasedGroup
from slimebus.bus.samples import Sample
from slimebus.config import resolve


def make(folder: Path, hooks: str, **fields: str) -> tuple[GroupMaker, list[Sample]]:
    """A training group of one sample under this class."""
    (folder / "mine.py").write_text(hooks)
    flags = {"rollout.hooks_path": "mine.py:Mine", "engine.engine": "cpu"} | {f"rollout.{name}": value for name, value in fields.items()}
    maker = GroupMaker(resolve(None, flags, {}).config, folder, Letters(), Policy("ab"))  # type: ignore[arg-type]
    leased = LeasedGroup(group="0/1", lease=1, num_samples=1, deadline_s=60.0)
    try:
        return maker, asyncio.run(maker.make_group(leased, msgspec.msgpack.encode({"prompt": "q", "label": "ab"})))
    except Dropped:
        return maker, []


@pytest.mark.parametrize(
    ("hooks", "said"),
    [
        ("class Mine:\n    pass\n", "the class has none of after_generate, is_trained, on_group, log, evaluate"),
        (
            "class Mine:\n    def log(self):\n        pass\n    async def on_groups(self, samples):\n        pass\n",
            r"a method that is never called; its on_groups: did you mean 'on_group'\?; begin the name of one of your own with _",
        ),
        ("class Mine:\n    def after_generation(self, response):\n        pass\n", "none of .*; its after_generation: .*'after_generate'"),
        ("class Mine:\n    def log(self):\n        pass\n    def set_up(self):\n        pass\n", r"its set_up: did you mean 'setup'\?"),
        (
            "class Mine:\n    def on_group(self, samples):\n        pass\n",
            r"on_group: too many .*called with \(samples, is_kept, task\)",
        ),
        ("class Mine:\n    def __init__(self, a):\n        pass\n", "could not be made without arguments"),
        ("class Mine:\n    def __init__(self):\n        raise SystemExit(3)\n", "could not be made without arguments: SystemExit: 3"),
        (
            "class Mine:\n    @property\n    def log(self):\n        raise OSError('no disk')\n",
            r"mine.py:Mine.log failed at .*:4: OSError: no disk",
        ),
        ("class Mine:\n    def __getattr__(self, name):\n        raise OSError(name)\n", r"Mine.after_generate failed at .*OSError"),
        ("class Mine:\n    log = 0\n", "mine.py:Mine.log is 0: expected something callable"),
    ],
)
def test_a_class_that_cannot_be_used_is_found_at_the_start(tmp_path: Path, hooks: str, said: str) -> None:
    (tmp_path / "mine.py").write_text(hooks)
    with pytest.raises(HookError, match=said):
        WorkerHooks("mine.py:Mine", tmp_path, 1.0)


def test_methods_of_its_own_are_the_users_affair(tmp_path: Path) -> None:
    own = "    def write(self):\n        pass\n    def _on_groups(self):\n        pass\n    logs = []\n"
    (tmp_path / "mine.py").write_text(f"class Mine:\n    def log(self):\n        pass\n{own}")
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
        "class Mine:\n    def on_group(self, samples, is_kept, task):\n        assert (task.group, task.label) == ('0/1', 'ab')\n"
        "        self.kept = is_kept\n        samples[0].reward = 9.0\n"
        "    def log(self):\n        return {'kept': float(self.kept)}\ndef keep(samples):\n    return False\n"
    )
    maker, samples = make(tmp_path, hooks, dynamic_sampling_filter_path="mine.py:keep")
    assert maker.hooks is not None
    assert (samples, maker.hooks.numbers) == ([], {"kept": 0.0})
    (tmp_path / "two").mkdir()
    maker, (sample,) = make(tmp_path / "two", hooks)
    assert maker.hooks is not None
    assert (sample.reward, maker.hooks.numbers) == (1.0, {"kept": 1.0})


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("log(self):\n        return {'\\ud800': 1.0}", r"surrogates not allowed"),
        ("log(self):\n        return dict.fromkeys(map(str, range(33)), 1.0)", r"at most 32 names, each of at most 64 characters"),
        ("log(self):\n        return {'x' * 65: 1.0}", r"at most 32 names"),
        ("log(self):\n        return {'x': 10**400}", r"too large"),
        ("log(self):\n        return {'x': float('nan')}", r"expected a number"),
        ("log(self):\n        return np.ones(3)", r"gave array\("),
        ("log(self):\n        return {Odd(): 1.0}", r"expected a map of numbers: no text"),
        ("is_trained(self, sample):\n        return np.ones(3)", r"gave array.*expected True or False"),
        ("is_trained(self, sample):\n        pass", r"gave None: expected True or False"),
    ],
)
def test_what_cannot_be_used_of_a_method_names_it(tmp_path: Path, body: str, said: str) -> None:
    odd = "class Odd:\n    def __str__(self):\n        raise OSError('no text')\n"
    with pytest.raises(PluginError, match=rf"hooks mine.py:Mine.{body.partition('(')[0]} gave .*{said}" if "gave" not in said else said):
        make(tmp_path, f"import numpy as np\n{odd}class Mine:\n    def {body}\n")


def test_a_bool_of_numpy_tells_what_is_trained(tmp_path: Path) -> None:
    _, (sample,) = make(tmp_path, "import numpy as np\nclass Mine:\n    def is_trained(self, sample):\n        return np.bool_(False)\n")
    assert not sample.loss_mask.any()


def test_a_workers_own_metrics_come_before_those_of_its_hooks() -> None:
    attempts = SimpleNamespace(
        counts=Counts(),
        running={},
        busy=SimpleNamespace(busy_s=0.0, since_s=1.0),
        maker=SimpleNamespace(hooks=SimpleNamespace(numbers={"mine": 1.0, "groups": 9.0})),
    )
    worker: Any = SimpleNamespace(attempts=attempts, engines=SimpleNamespace(tokens_made=5), sync=None)
    metrics = Worker._metrics(worker)
    assert (metrics["groups"], list(metrics)[-1]) == (0.0, "mine")


def test_a_teardown_that_is_no_function_is_named(tmp_path: Path) -> None:
    maker, _ = make(tmp_path, "class Mine:\n    teardown = 3\n    def log(self):\n        pass\n")
    assert maker.hooks is not None
    with pytest.raises(PluginError, match=r"Mine.teardown is 3: expected something callable"):
        asyncio.run(maker.hooks.life.teardown())
