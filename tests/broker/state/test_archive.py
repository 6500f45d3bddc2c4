"""Records of steps freed long ago leave memory, and come back for a trainer that goes far behind its checkpoint."""

from typing import Any

import pytest

from broker.state import batches
from slimebus import messages as m


@pytest.fixture(autouse=True)
def _short_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "RECENT_STEPS", 2)


def train(desk: Any, steps: range, lineage: str = "L") -> list[list[str]]:
    trained = []
    for step in steps:
        desk.fill(2, desk.state.version_of(step), lineage)
        trained.append(desk.train(step, checkpoint=step + 1, lineage=lineage))
    return trained


def test_memory_holds_the_last_steps_only(desk: Any) -> None:
    train(desk, range(10))
    assert sorted(desk.state.steps) == [8, 9]
    assert sorted(int(key) for key, _ in desk.store.scan("freed")) == list(range(8))
    assert sorted(int(key) for key, _ in desk.store.scan("steps")) == [8, 9]
    desk.restart()
    assert sorted(desk.state.steps) == [8, 9]


@pytest.mark.parametrize("restarts", [False, True])
def test_a_rewind_far_behind_queues_every_prompt_of_the_steps_again(desk: Any, restarts: bool) -> None:
    trained = train(desk, range(10))
    if restarts:
        desk.restart()
    desk.begin(step=3, version=3, lineage="M")
    queued = sorted(g.id for g in desk.state.groups.by_id.values() if g.phase == "queued")
    assert queued == sorted(group for groups in trained[3:] for group in groups)
    assert not desk.state.meta.counted.get("prompts lost in a rewind")
    assert sorted(int(key) for key, _ in desk.store.scan("freed")) == [0, 1, 2]
    again = train(desk, range(3, 10), "M")
    assert sorted(group for groups in again for group in groups) == queued
    desk.begin(step=0, version=0, lineage="N")
    assert sum(g.phase == "queued" for g in desk.state.groups.by_id.values()) == 20
    assert not list(desk.store.scan("freed"))


def test_a_step_freed_and_rewound_in_one_burst_is_not_lost(desk: Any) -> None:
    train(desk, range(4))
    desk.state.records = lambda table, key: None  # nothing of this burst is on disk yet
    batches.free(desk.state, 4)
    desk.state.meta.floor = 4
    desk.state.save("freed", "1", desk.store.get("freed", "1"))
    assert desk.state.read("freed", "1") == desk.store.get("freed", "1")
    desk.state.delete("freed", "1")
    assert desk.state.read("freed", "1") is None


def test_a_trainer_that_jumps_ahead_and_back_takes_no_time_for_the_steps_between(desk: Any) -> None:
    assert desk.ask("t", m.Resume(step=1 << 40, version=0, lineage="M")) == m.Ok()
    assert desk.ask("t", m.Publish(lineage="M", version=0, publishers=["p"])) == m.Ok()
    assert desk.ask("t", m.Commit(step=(1 << 40) - 1, checkpoint=1 << 40)) == m.Ok()
    assert desk.ask("t", m.Resume(step=0, version=0, lineage="N")) == m.Ok()
    assert desk.status["step"] == 0
