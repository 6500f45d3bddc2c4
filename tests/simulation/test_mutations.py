"""The simulation finds faults: each deliberate one below is caught within a few seeds."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker.state import admission, clients, leases, staleness, timeline
from broker.state.groups import LEASED
from broker.state.table import State

sys.path.insert(0, str(Path(__file__).parent))
from world import World

SEEDS = 60


def _keep_abandoned(state: State, group: Any, reason: str, requeue: Callable[..., None] = State.requeue) -> None:
    if "version of the abandoned timeline" not in reason:
        requeue(state, group, reason)


MUTATIONS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "nothing is ever stale": (staleness, "is_stale", lambda state, group, step: False),
    "an expired lease does not requeue": (leases, "expire", lambda state, lease: None),
    "a rewind keeps samples of abandoned versions": (State, "requeue", _keep_abandoned),
    "a rewind forgets freed prompts": (timeline, "_restore_freed", lambda state, group_id: None),
    "a rewind leaves old leases": (timeline, "_revoke_leases", lambda state: None),
    "two trainers may train": (clients, "_fence_other_trainers", lambda state, newest: None),
    "admission has no bound": (
        admission,
        "refusal_for",
        lambda state, client, needs_weights: admission.unready_weights(state, client),
    ),
    "a put needs no lease": (
        leases,
        "_put_refusal",
        lambda state, group, client, done: "" if group is not None and group.phase == LEASED else "lost",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_simulation_catches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTATIONS[name])
    for seed in range(SEEDS):
        try:
            World(seed).run()
        except (AssertionError, KeyError):
            return
    pytest.fail(f"{name!r}: not caught in {SEEDS} seeds")
