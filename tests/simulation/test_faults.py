"""Many seeds of the simulated world."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from world import World

SEEDS = 200
PER_TEST = 25


@pytest.mark.parametrize("first", range(0, SEEDS, PER_TEST))
def test_every_prompt_is_trained_once_or_accounted_for_under_faults(first: int) -> None:
    for seed in range(first, first + PER_TEST):
        try:
            World(seed).run()
        except AssertionError as broken:
            raise AssertionError(f"seed {seed}: {broken}") from broken


def test_without_faults_only_staleness_wastes_and_waiting_wastes_nothing() -> None:
    for seed in range(40):
        world = World(seed, faults=False)
        world.run()
        allowed = set() if world.rules.on_stale == "wait" else {"stale"}
        assert set(world.machine.state.meta.waste) <= allowed, f"seed {seed}: {world.machine.state.meta.waste}"


def test_a_seed_replays_to_the_same_event() -> None:
    worlds = [World(7), World(7)]
    for world in worlds:
        world.run()
    assert worlds[0].events == worlds[1].events
    assert worlds[0].trained == worlds[1].trained
