"""Slow groups are leased twice: everything that holds without it holds with it."""

from collections import Counter
from typing import Any

import msgspec
import pytest
from simulation import scenario
from simulation.world import World

from broker.state import hedging

SEEDS = 25


def test_second_leases_break_nothing_under_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    rules_of = scenario._rules
    monkeypatch.setattr(scenario, "_rules", lambda *a, **k: msgspec.structs.replace(rules_of(*a, **k), hedge_after=1.2))
    monkeypatch.setattr(hedging, "MIN_MEASURED", 3)
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        world = World(seed)
        try:
            world.run()
        except AssertionError as broken:
            raise AssertionError(f"seed {seed}: {broken}") from broken
        seen.update(counted_of(world))
    assert min(seen[f"hedges {word}"] for word in ("begun", "won", "lost", "ended early")) > 10, seen


def counted_of(world: Any) -> dict[str, int]:
    return {} if world.broker.machine is None else world.broker.machine.state.meta.counted
