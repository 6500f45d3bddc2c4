"""The life of engines, one rule at a time; tests/simulation/test_engines.py has all of them at once, under random faults."""

import pytest

from rollout.engines.engine_state import RETRY_S, Action, EngineState, Event, ImpossibleMove, PoolState


class Pool:
    """A PoolState with a clock. Its engines serve L:1."""

    def __init__(self, *engines: EngineState) -> None:
        self.state, self.now = PoolState(), 0.0
        self.state.engines = list(engines)
        for engine in engines:
            self("process_ready", engine)
        self("publish", text="L:1")
        for engine in engines:
            if not engine.is_frozen:
                self("load_verified", engine, "L:1")

    def __call__(self, event: Event, engine: EngineState | None = None, text: str = "") -> list[str]:
        """What is to be done, but for what is logged."""
        return [action.act for action in self.actions(event, engine, text) if action.act != "log"]

    def actions(self, event: Event, engine: EngineState | None = None, text: str = "") -> list[Action]:
        return self.state.apply(event, engine, now=self.now, text=text)


def attached() -> EngineState:
    return EngineState("http://attached")


def test_what_cannot_happen_is_refused_with_what_happened_before() -> None:
    pool = Pool(engine := attached())
    with pytest.raises(ImpossibleMove, match=r"attached is serving and loads nothing: 'verified' cannot happen.* 0.0 s: process_ready"):
        pool("load_verified", engine, "L:2")


def test_a_version_is_given_to_those_in_service_and_to_the_others_once_one_has_it() -> None:
    pool = Pool(first := attached(), second := attached())
    pool("version_found", second, "default")
    pool("load_failed", second, "it refused")
    assert pool("publish", text="L:2") == ["load"]
    assert (first.phase, second.phase) == ("updating", "sick")
    pool.now = RETRY_S
    assert pool("tick") == []
    assert pool("load_verified", first, "L:2") == ["load"]
    assert (first.phase, second.phase, second.loading) == ("serving", "syncing", "L:2")


def test_the_same_trouble_is_logged_once_and_its_end_too() -> None:
    pool = Pool(attached(), second := attached())
    told: list[str] = []
    for event, text in (("version_found", "default"), ("load_failed", "no"), ("tick", ""), ("load_failed", "no"), ("tick", "")):
        pool.now += RETRY_S
        told += [a.text for a in pool.actions(event, None if event == "tick" else second, text) if a.act == "log"]  # type: ignore[arg-type]
    told += [action.text for action in pool.actions("load_verified", second, "L:1")]
    assert told[1:] == ["engine at http://attached stays out of service: no", "engine at http://attached has version L:1 now"]
