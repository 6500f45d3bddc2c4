"""The life of engines, one rule at a time; tests/simulation/test_engines.py has all of them at once, under random faults."""

import pytest

from rollout.engines import engine_state
from rollout.engines.engine_state import RESTART_PAUSE_S, RETRY_S, SILENT_PROBES, Action, EngineState, Event, ImpossibleMove, PoolState


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


def ours() -> EngineState:
    return EngineState("http://ours", is_owned=True)


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


def test_a_version_published_during_a_load_is_given_after_it() -> None:
    pool = Pool(first := attached(), second := attached())
    pool("version_found", second, "default")
    assert second.loading == "L:1"
    pool("publish", text="L:2")
    pool("load_verified", first, "L:2")
    assert pool("load_verified", second, "L:1") == ["load"]
    assert (second.phase, second.version, second.loading) == ("updating", "L:1", "L:2")


def test_an_engine_that_hangs_is_replaced_if_it_is_ours_and_waited_for_if_it_is_not() -> None:
    pool = Pool(own := ours(), other := attached())
    for engine, actions, phase in ((own, ["end_requests", "replace"], "starting"), (other, ["end_requests", "lost"], "sick")):
        done = [act for _ in range(SILENT_PROBES) for act in pool("probe_failed", engine)]
        assert (done, engine.phase, engine.version) == (actions, phase, "")
    assert pool("probe_failed", other) == [], "once"
    assert pool("publish", text="L:1") == [], "nothing is given to an engine that does not answer"
    pool("probe_answered", other)
    assert pool("publish", text="L:1") == ["load"]


def test_an_engine_that_hangs_in_a_load_holds_nobody_up_that_has_the_version() -> None:
    pool = Pool(first := attached(), second := attached())
    pool("publish", text="L:2")
    assert pool("probe_failed", second) == []
    pool("load_verified", first, "L:2")
    assert pool("probe_failed", second) == ["cancel_load", "end_requests"]


def test_a_start_that_failed_is_tried_again_after_a_pause() -> None:
    pool = Pool(engine := ours())
    assert pool("process_ended", engine) == ["end_requests", "replace", "lost"]
    pool("start_failed", engine, "no GPU")
    assert pool.state.next_deadline == RESTART_PAUSE_S
    pool.now = RESTART_PAUSE_S
    assert pool("tick") == ["end_requests", "replace"]


def test_an_engine_that_is_detached_in_the_middle_of_a_load_is_left_unpaused_at_its_deadline() -> None:
    pool = Pool(first := attached(), second := attached())
    pool("publish", text="L:2")
    assert pool("detach", first) == ["abort_requests"]
    pool.now = engine_state.ABORT_TIMEOUT_S
    assert pool("tick") == []
    assert pool("process_ready", first) == [], "nothing brings it back"
    pool.now += engine_state.SETTLE_S
    assert pool("tick") == ["cancel_load", "end_requests", "resume", "remove"]
    assert pool.state.engines == [second]


def test_a_worker_that_leaves_resumes_attached_engines_that_it_was_loading_and_loads_nothing_more() -> None:
    pool = Pool(first := attached(), second := attached(), own := ours())
    pool("publish", text="L:2")
    pool("load_verified", first, "L:2")
    assert pool("leave") == ["cancel_load", "end_requests", "resume", "cancel_load", "end_requests"]
    assert (first.phase, second.phase, own.phase) == ("serving", "sick", "sick")
    assert pool("probe_answered", second) == []


def test_the_same_trouble_is_logged_once_and_its_end_too() -> None:
    pool = Pool(attached(), second := attached())
    told: list[str] = []
    for event, text in (("version_found", "default"), ("load_failed", "no"), ("tick", ""), ("load_failed", "no"), ("tick", "")):
        pool.now += RETRY_S
        told += [a.text for a in pool.actions(event, None if event == "tick" else second, text) if a.act == "log"]  # type: ignore[arg-type]
    told += [action.text for action in pool.actions("load_verified", second, "L:1")]
    assert told[1:] == ["engine at http://attached stays out of service: no", "engine at http://attached has version L:1 now"]
