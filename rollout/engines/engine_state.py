"""The life of a worker's engines as a state machine: what happened goes in, with the time, and what to do comes out. No IO.

                .------- its process ended, or it is ours and hung: another process -------.
                v                                                                          |
            starting --ready--> syncing --verified--> serving --load--> updating      any of these --detached--> draining --> removed
                                ^  |  failed            |   ^              |
                           load |  v                    |   '--verified----|
                                sick <--hung, failed, or has other weights-'

syncing     it is given a version that it has never had, or waits for one: it is out of service
serving     it verifiably has `version`; the only phase in which it is sent requests
updating    in service, but between two versions: requests wait
sick        it failed a load, has other weights than it was given, or does not answer: everything is loaded anew
draining    it gets no more requests and never returns; what it has begun is aborted and continued by others

A frozen engine has weights of its own and goes from starting to serving. rollout/engines/pool.py does what comes out: it answers each
`load` that is not cancelled with load_verified or load_failed, each `replace` with process_ready or start_failed, and `abort_requests`
with requests_ended. It reports probes in every phase but starting, and calls `tick` at `next_deadline`.
"""

from collections import deque
from collections.abc import Iterable
from typing import Literal, NamedTuple

from slimebus.bus.errors import UsageError

Phase = Literal["starting", "syncing", "serving", "updating", "sick", "draining"]
Event = Literal[
    "process_ready", "start_failed", "process_ended", "probe_answered", "probe_failed", "publish", "load_verified", "load_failed",
    "version_found", "detach", "requests_ended", "tick", "leave",
]  # fmt: skip
Act = Literal["replace", "load", "cancel_load", "end_requests", "abort_requests", "resume", "remove", "lost", "log"]

PROBE_S, SILENT_PROBES = 5.0, 6
"""An engine that answers none of so many probes in a row, 30 s, hangs: ours is killed and replaced, an attached one is sick."""
RETRY_S, RESTART_PAUSE_S = 1.0, 5.0
"""After a load, or a start, that failed."""
ABORT_TIMEOUT_S, SETTLE_S = 5.0, 1.0
"""How long an engine that is detached has for its requests to end, and then for a load under way."""
NUM_KEPT_EVENTS = 30

MOVES: dict[tuple[Phase, str], Phase] = {
    ("starting", "ready"): "syncing",
    ("starting", "start failed"): "starting",
    ("starting", "ready with weights"): "serving",
    **{(phase, "load"): "syncing" for phase in ("syncing", "sick")},
    **{(phase, "load"): "updating" for phase in ("serving", "updating")},
    **{(phase, "verified"): "serving" for phase in ("syncing", "updating")},
    **{(phase, "failed"): "sick" for phase in ("syncing", "updating")},
    **{("draining", cause): "draining" for cause in ("verified", "failed")},
    **{(phase, "out of service"): "sick" for phase in ("syncing", "serving", "updating", "sick")},
    ("sick", "answers with weights"): "serving",
    **{(phase, "replaced"): "starting" for phase in ("starting", "syncing", "serving", "updating", "sick")},
    **{(phase, "detached"): "draining" for phase in ("starting", "syncing", "serving", "updating", "sick")},
}
"""(phase, cause) -> phase."""
ENDS_OF_LOADS = ("verified", "failed")


class ImpossibleMove(RuntimeError):
    """A mistake of ours: this cannot happen to an engine in this phase. The text names what happened to it before."""


class EngineState:
    """One engine, at `url`.

    version        that it verifiably has, or had before the load under way, as LINEAGE:NUMBER; empty: unknown, or its own
    loading        the version that it is being given
    silent         probes in a row that it did not answer
    may_be_paused  a load was begun, and none finished since
    has_requests   draining: it may still be running some
    deadline       starting: when another process is tried; sick: another load; draining: when it is no longer waited for
    reported       what was last logged of it
    """

    def __init__(self, url: str, *, model: str = "", is_owned: bool = False, is_frozen: bool = False) -> None:
        self.url, self.model, self.is_owned, self.is_frozen = url, model, is_owned, is_frozen
        self.phase: Phase = "starting"
        self.version = self.loading = ""
        self.silent, self.may_be_paused, self.has_requests = 0, False, False
        self.deadline: float | None = None
        self.reported = ""
        self.history: deque[str] = deque(maxlen=NUM_KEPT_EVENTS)

    def move(self, cause: str) -> None:
        """Raises ImpossibleMove."""
        if (self.phase, cause) not in MOVES or (cause in ENDS_OF_LOADS and not self.loading):
            what = f"engine {self.url} is {self.phase} and loads {self.loading or 'nothing'}: {cause!r} cannot happen to it"
            raise ImpossibleMove(f"{what}; what did: {', '.join(self.history)}")
        self.phase = MOVES[self.phase, cause]

    @property
    def is_in_service(self) -> bool:
        """Whether requests may be sent to it, or may again after the load under way."""
        return self.phase in ("serving", "updating")

    @property
    def can_load(self) -> bool:
        """Whether it can be given a version."""
        is_waiting = self.phase in ("syncing", "sick") and not self.silent
        return not (self.is_frozen or self.loading) and (self.is_in_service or is_waiting)

    def serves(self, version: str) -> bool:
        """Whether it verifiably has this version and takes requests."""
        return self.phase == "serving" and self.version == version


class Action(NamedTuple):
    """text: the version to load, or what to log."""

    act: Act
    engine: EngineState
    text: str = ""


class PoolState:
    """All engines of a worker. newest: the version that those of the policy are to have."""

    def __init__(self) -> None:
        self.engines: list[EngineState] = []
        self.newest = ""
        self._now = 0.0
        self._actions: list[Action] = []

    @property
    def next_deadline(self) -> float | None:
        """When `tick` is due."""
        return min((engine.deadline for engine in self.engines if engine.deadline is not None), default=None)

    @property
    def policy(self) -> list[EngineState]:
        """The engines that get what the trainer publishes."""
        return [engine for engine in self.engines if not engine.is_frozen]

    def apply(self, event: Event, engine: EngineState | None = None, *, now: float, text: str = "") -> list[Action]:
        """What to do now. text: the version published, verified or found, or why something failed.

        Raises ImpossibleMove, and UsageError for an engine that may not be detached: nothing has changed then.
        """
        self._now, self._actions = now, []
        in_service = any(one.is_in_service for one in self.policy)
        if engine is not None:
            if event != "probe_answered" or engine.silent:
                engine.history.append(f"{now:.1f} s: {event} {text}".rstrip())
            if engine.phase == "draining" and event not in ("load_verified", "load_failed", "requests_ended"):
                return []
        getattr(self, f"_{event}")(*([] if engine is None else [engine]), *([text] if text else []))
        if event not in ("publish", "leave"):
            self._load(self._engines_behind())
        if in_service and engine is not None and not any(one.is_in_service for one in self.policy):
            self._emit_action("lost", engine)
        return self._actions

    # --- what happens ---

    def _process_ready(self, engine: EngineState) -> None:
        engine.move("ready with weights" if engine.is_frozen else "ready")

    def _start_failed(self, engine: EngineState, text: str) -> None:
        engine.move("start failed")
        self._report(engine, text)
        engine.deadline = self._now + RESTART_PAUSE_S

    def _process_ended(self, engine: EngineState) -> None:
        self._replace(engine, "ended; starting another")

    def _probe_answered(self, engine: EngineState) -> None:
        engine.silent = 0
        if engine.phase == "sick" and engine.is_frozen:
            engine.move("answers with weights")

    def _probe_failed(self, engine: EngineState) -> None:
        engine.silent += engine.phase != "starting"
        # Where another engine has the version already it goes on now, and this one later.
        is_held_up = bool(engine.loading) and any(other.serves(self.newest) for other in self.policy)
        if engine.silent >= SILENT_PROBES and engine.is_owned:
            self._replace(engine, f"has not answered for {PROBE_S * SILENT_PROBES:.0f} s; killing it and starting another")
        elif engine.silent and (is_held_up or (engine.silent >= SILENT_PROBES and (engine.is_in_service or engine.loading))):
            self._take_out(engine, "does not answer; it is out of service until it does")

    def _publish(self, version: str) -> None:
        self.newest = version
        in_service = [engine for engine in self.policy if engine.is_in_service]
        self._load(engine for engine in in_service or self.policy if engine.can_load and not engine.serves(version))

    def _load_verified(self, engine: EngineState, version: str) -> None:
        engine.move("verified")
        if engine.reported:
            self._emit_action("log", engine, f"engine at {engine.url} has version {version} now")
        engine.version, engine.loading, engine.may_be_paused, engine.reported = version, "", False, ""
        self._end_drain(engine)

    def _load_failed(self, engine: EngineState, text: str) -> None:
        engine.move("failed")
        engine.loading = ""
        if engine.phase == "sick":
            self._end_work(engine, f"stays out of service: {text}")
            engine.deadline = self._now + RETRY_S
        self._end_drain(engine)

    def _version_found(self, engine: EngineState, found: str) -> None:
        if engine.phase == "serving" and not engine.is_frozen and found != engine.version:
            self._take_out(engine, f"has other weights than it was given, {engine.version}: {found}; everything is loaded anew")

    def _detach(self, engine: EngineState) -> None:
        others = [one for one in self.engines if one.is_frozen == engine.is_frozen and (one.model == engine.model or not one.is_frozen)]
        if not any(other.is_in_service for other in others if other is not engine):
            raise UsageError(f"{engine.url} is the only engine in service of its model; attach another first, or drain the worker")
        engine.move("detached")
        engine.has_requests, engine.deadline = True, self._now + ABORT_TIMEOUT_S
        self._emit_action("abort_requests", engine)

    def _requests_ended(self, engine: EngineState) -> None:
        if engine.has_requests:
            engine.has_requests, engine.deadline = False, self._now + SETTLE_S
            self._end_drain(engine)

    def _tick(self) -> None:
        for engine in [one for one in self.engines if one.deadline is not None and one.deadline <= self._now]:
            engine.deadline = None
            if engine.phase == "starting":
                self._replace(engine, "")
            elif engine.phase == "draining" and engine.has_requests:
                self._requests_ended(engine)
            elif engine.phase == "draining":
                self._remove(engine)

    def _leave(self) -> None:
        """The worker ends: nothing more is loaded, and no attached engine stays paused."""
        self.newest = ""
        for engine in list(self.engines):
            if engine.phase == "draining":
                self._remove(engine)
            elif engine.loading:
                self._take_out(engine, "is left with incomplete weights: a load of them was not finished")
            engine.deadline = None
            self._resume(engine)

    # --- what follows ---

    def _emit_action(self, act: Act, engine: EngineState, text: str = "") -> None:
        self._actions.append(Action(act, engine, text))

    def _report(self, engine: EngineState, text: str) -> None:
        """Log it, unless that was the last that was logged of this engine."""
        if text and text != engine.reported:
            self._emit_action("log", engine, text)
            engine.reported = text

    def _engines_behind(self) -> list[EngineState]:
        """Those that can be given the newest version now: where it was not begun yet, only once another has it."""
        behind = [one for one in self.policy if one.can_load and one.deadline is None and self.newest and not one.serves(self.newest)]
        is_good = any(one.serves(self.newest) for one in self.policy)
        return [one for one in behind if is_good or one.is_in_service]

    def _load(self, engines: Iterable[EngineState]) -> None:
        for engine in list(engines):
            engine.move("load")
            engine.loading, engine.may_be_paused, engine.deadline = self.newest, True, None
            self._emit_action("load", engine, self.newest)

    def _take_out(self, engine: EngineState, why: str) -> None:
        """Sick: what it was running or loading ends, and what it has is unknown."""
        engine.move("out of service")
        self._end_work(engine, why)

    def _replace(self, engine: EngineState, why: str) -> None:
        engine.move("replaced")
        self._end_work(engine, why)
        engine.silent, engine.may_be_paused = 0, False
        self._emit_action("replace", engine)

    def _end_work(self, engine: EngineState, why: str) -> None:
        self._report(engine, why and f"engine at {engine.url} {why}")
        if engine.loading:
            self._emit_action("cancel_load", engine)
        engine.version, engine.loading, engine.deadline = "", "", None
        self._emit_action("end_requests", engine)

    def _resume(self, engine: EngineState) -> None:
        if engine.may_be_paused and not engine.is_owned:
            engine.may_be_paused = False
            self._emit_action("resume", engine)

    def _end_drain(self, engine: EngineState) -> None:
        if engine.phase == "draining" and not (engine.has_requests or engine.loading):
            self._remove(engine)

    def _remove(self, engine: EngineState) -> None:
        engine.has_requests = False
        self._end_work(engine, "")
        self._resume(engine)
        self.engines.remove(engine)
        self._emit_action("remove", engine)
