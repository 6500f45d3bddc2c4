"""Deliberate bugs in the life of engines, one at a time, as mutations.py has them for the broker."""

from typing import Any

from simulation.mutations import Patch

from rollout.engines import engine_state
from rollout.engines.engine_state import EngineState, PoolState

_do, _detach, _start_failed, _load_verified, _behind = (
    PoolState._emit_action, PoolState._detach, PoolState._start_failed, PoolState._load_verified, PoolState._engines_behind,
)  # fmt: skip


def _without(act: str) -> Any:
    def do(pool: PoolState, what: Any, engine: EngineState, text: str = "") -> None:
        if what != act:
            _do(pool, what, engine, text)

    return do


def _wait_without_end(pool: PoolState, engine: EngineState) -> None:
    _detach(pool, engine)
    engine.deadline = None


def _fail_for_good(pool: PoolState, engine: EngineState, text: str) -> None:
    _start_failed(pool, engine, text)
    engine.deadline = None


def _believe(pool: PoolState, engine: EngineState, version: str) -> None:
    """What was asked for last is what it has, whatever it reports."""
    _load_verified(pool, engine, pool.newest)


def _leave_behind(pool: PoolState) -> list[EngineState]:
    return [engine for engine in _behind(pool) if not engine.is_in_service]


def _never_held_up(pool: PoolState, engine: EngineState) -> None:
    engine.silent += engine.phase != "starting"
    if engine.silent >= engine_state.SILENT_PROBES and engine.is_owned:
        pool._replace(engine, "hangs")
    elif engine.silent >= engine_state.SILENT_PROBES and (engine.is_in_service or engine.loading):
        pool._take_out(engine, "hangs")


def _only_ours_hang(pool: PoolState, engine: EngineState) -> None:
    if engine.is_owned:
        _never_held_up(pool, engine)


ENGINE_MUTATIONS: dict[str, Patch] = {
    "a load that failed leaves an engine in service": (
        engine_state, "MOVES", engine_state.MOVES | {("updating", "failed"): "serving", ("syncing", "failed"): "serving"},
    ),
    "an engine that is detached returns when its load is done": (
        engine_state, "MOVES", engine_state.MOVES | {("draining", "verified"): "serving"},
    ),
    "the version that was asked for is believed": (PoolState, "_load_verified", _believe),
    "requests stay at an engine that is taken out of service": (PoolState, "_emit_action", _without("end_requests")),
    "a load goes on at an engine that is taken out of service": (PoolState, "_emit_action", _without("cancel_load")),
    "an engine whose load was cut off stays paused": (PoolState, "_emit_action", _without("resume")),
    "nobody is told that the last engine was lost": (PoolState, "_emit_action", _without("lost")),
    "other weights than an engine was given are not noticed": (PoolState, "_version_found", lambda pool, engine, found: None),
    "an attached engine that hangs stays in service": (PoolState, "_probe_failed", _only_ours_hang),
    "the others wait for an engine that hangs in a load": (PoolState, "_probe_failed", _never_held_up),
    "an engine that is detached waits for its requests without end": (PoolState, "_detach", _wait_without_end),
    "a start that failed is not tried again": (PoolState, "_start_failed", _fail_for_good),
    "a version that was published during a load is forgotten": (PoolState, "_engines_behind", _leave_behind),
    "an engine that failed a load is not given it again": (PoolState, "_engines_behind", lambda pool: []),
}  # fmt: skip
"""Name: what is replaced, and by what."""
