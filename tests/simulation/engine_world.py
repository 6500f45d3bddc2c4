"""The real state machine of a worker's engines among simulated ones, on a virtual clock.

The engines hang, end, refuse loads, start slowly, are attached, detached and restarted by others, while versions are announced, also in the
middle of loads. What rollout/engines/pool.py and rollout/weights/sync.py do beside it is done here without IO. Everything follows from
the seed. Faults happen until `calm_at`; soon after it every engine must serve the newest version.
"""

import random
from collections import Counter, deque
from collections.abc import Callable

from simulation.actor import require

from broker.simulate.timeline import Timeline
from rollout.engines import engine_state
from rollout.engines.engine_state import Action, EngineState, Event, PoolState
from slimebus.bus.errors import UsageError

TRACED = 60
PROBE_S, PROBE_PAUSE_S, ATTACH_TIMEOUT_S = 5.0, 1.0, 10.0
CALL_TIMEOUT_S = 60.0
"""A call to an engine that does not answer fails then."""
SYNC_RETRY_S = 1.0
HANG_NOTICED_S = engine_state.SILENT_PROBES * PROBE_S + PROBE_S + 1
"""An engine that answers nothing for so long is out of service."""
HELD_UP_S = 2 * PROBE_S + 1
"""One that hangs in a load is not waited for longer where another has the version."""
DRAIN_S = engine_state.ABORT_TIMEOUT_S + engine_state.SETTLE_S + 0.01
LONGEST_S = 240.0
"""Once faults are over, every engine serves the newest version within this: a hang is noticed, a process started, a load tried again."""
TORN = "torn"


class Server:
    """What is behind an address: the process of an engine, with what it really has."""

    def __init__(self, state: EngineState) -> None:
        self.state, self.weights = state, "default"
        self.is_paused = self.is_dead = self.was_restarted = self.is_gone = False
        self.hung_until, self.silent_since = 0.0, -1.0
        self.requests: dict[int, str] = {}
        self.load: Load | None = None
        self.load_since = self.draining_since = 0.0
        self.generation = 0


class Load:
    """A load under way; a cancelled one tells nothing."""

    def __init__(self, version: str) -> None:
        self.version, self.is_cancelled = version, False


class EngineWorld:
    """One simulated worker's engines. `run()` returns when it has ended well, and raises Broken otherwise."""

    def __init__(self, seed: int, *, is_verbose: bool = False) -> None:
        self.seed, self.is_verbose, self.random, self.timeline = seed, is_verbose, random.Random(seed), Timeline()
        self.events, self.num_steps = 0, 0
        self.recent: deque[str] = deque(maxlen=TRACED)
        self.faults: Counter[str] = Counter()
        self.pool = PoolState()
        self.servers: dict[EngineState, Server] = {}
        self.announced, self.serving, self.is_syncing, self.has_left = "", "", False, False
        self.loads_of_round: list[Load] = []
        self.newest_since = float("inf")
        self.roughness = self.random.choice((0.3, 1.0, 3.0))
        self.calm_at = self.random.uniform(30, 150)
        self.leaves_early = self.random.random() < 0.15

    @property
    def now(self) -> float:
        """In virtual seconds."""
        return self.timeline.now

    @property
    def is_calm(self) -> bool:
        """Whether faults are over."""
        return self.now >= self.calm_at

    def run(self) -> None:
        """From the start of a worker to its end."""
        for _ in range(self.random.randint(1, 3)):
            self.add(is_owned=self.random.random() < 0.5)
        if self.random.random() < 0.3:
            self.add(is_owned=self.random.random() < 0.5, is_frozen=True)
        self.announce()
        for act, every_s in ((self.fail_something, 8.0), (self.announce, 20.0), (self.send, 1.0)):
            self.often(act, every_s / (self.roughness if act == self.fail_something else 1.0))
        self.until(lambda: self.is_calm, self.calm_at)
        for server in self.servers.values():
            self.go_on(server)
        if not self.leaves_early:
            self.until(self.is_well, self.now + LONGEST_S)
            require(self.is_well(), f"{LONGEST_S:.0f} s after the last fault not every engine serves {self.announced}: {self.told()}")
        self.leave()

    def until(self, is_so: Callable[[], bool], deadline: float) -> None:
        """Let things happen until then."""
        while self.now < deadline and not is_so():
            self.timeline.step()
            self.check()

    def often(self, act: Callable[[], None], every_s: float) -> None:
        """Until faults are over."""

        def again() -> None:
            if not self.is_calm:
                act()
                self.often(act, every_s)

        self.timeline.later(self.random.expovariate(1 / every_s), again)

    # --- the worker around the machine ---

    def apply(self, event: Event, server: Server | None = None, text: str = "") -> list[Action]:
        """Tell the machine what happened, and do what it says."""
        self.events += 1
        state = server.state if server else None
        self.note(f"{event} {state.url if state else ''} {text}")
        actions = self.pool.apply(event, state, now=self.now, text=text)
        for action in actions:
            if action.act != "log":
                self.note(f"    {action.act} {action.engine.url} {action.text}")
                getattr(self, f"do_{action.act}")(self.servers[action.engine], action.text)
        due = self.pool.next_deadline
        if due is not None:
            self.timeline.later(max(0.0, due - self.now), self.tick)
        return actions

    def tick(self) -> None:
        """As the timer of the pool, which is set anew after each event."""
        due = self.pool.next_deadline
        if due is not None and due <= self.now and not self.has_left:
            self.apply("tick")

    def note(self, text: str) -> None:
        """For the trace."""
        line = f"{self.now:9.3f}  {text}"
        self.recent.append(line)
        if self.is_verbose:
            print(line)

    def add(self, *, is_owned: bool, is_frozen: bool = False, is_attached_later: bool = False) -> None:
        """Another engine, which starts."""
        state = EngineState(f"e{self.timeline.serial()}", is_owned=is_owned, is_frozen=is_frozen, model="judge" if is_frozen else "")
        server = self.servers[state] = Server(state)
        self.pool.engines.append(state)
        self.note(f"add {state.url}{' owned' * is_owned}{' frozen' * is_frozen}")
        self.start(server, gives_up_s=ATTACH_TIMEOUT_S if is_attached_later else 0.0)
        self.timeline.later(self.random.random(), lambda: self.probe(server))

    def start(self, server: Server, *, gives_up_s: float = 0.0) -> None:
        """Wait until it is ready."""
        generation, took_s = server.generation, self.random.choice((0.5, 3.0, 25.0)) * (0.05 if not server.state.is_owned else 1.0)

        def ready() -> None:
            if server.generation != generation or server.is_gone or self.has_left:
                return
            if self.answers(server):
                self.apply("process_ready", server)
            elif gives_up_s:  # a command to attach it, which fails
                server.is_gone = True
                self.pool.engines.remove(server.state)
            elif server.state.is_owned or self.random.random() < 0.3:
                self.apply("start_failed", server, "it was not ready in time")
            else:
                self.timeline.later(1.0, ready)

        self.timeline.later(max(took_s, gives_up_s * self.random.random()), ready)

    def answers(self, server: Server) -> bool:
        """Whether it does."""
        return not server.is_dead and self.now >= server.hung_until

    def probe(self, server: Server) -> None:
        """Once a second, or less often where it takes its time."""
        if server.is_gone or self.has_left:
            return
        if server.state.phase == "starting":
            self.timeline.later(PROBE_PAUSE_S, lambda: self.probe(server))
        elif server.is_dead and server.state.is_owned:
            self.apply("process_ended", server)
            self.timeline.later(PROBE_PAUSE_S, lambda: self.probe(server))
        else:
            took_s = self.random.uniform(0.0, 0.01) if self.answers(server) or server.is_dead else PROBE_S
            self.timeline.later(took_s, lambda: self.probed(server, server.generation, answers=self.answers(server) and took_s < PROBE_S))

    def probed(self, server: Server, generation: int, *, answers: bool) -> None:
        """Its answer, or none."""
        if not (server.is_gone or self.has_left) and generation == server.generation:
            self.apply("probe_answered" if answers else "probe_failed", server)
        self.timeline.later(PROBE_PAUSE_S, lambda: self.probe(server))

    def send(self) -> None:
        """A request to some engine that serves."""
        serving = [server for state, server in self.servers.items() if state in self.pool.engines and state.phase == "serving"]
        if not serving:
            return
        server, id = self.random.choice(serving), self.timeline.serial()
        is_as_known = server.state.is_frozen or server.was_restarted or server.is_dead or server.weights == server.state.version
        require(is_as_known, f"a request is sent to {server.state.url}, which has {server.weights}, not {server.state.version}")
        require(not server.is_paused, f"a request is sent to {server.state.url}, which is paused")
        server.requests[id] = server.state.version
        self.timeline.later(self.random.expovariate(0.2), lambda: self.answer(server, id))

    def answer(self, server: Server, id: int) -> None:
        """It is done, fails, or waits for an engine that is paused or hangs."""
        if id not in server.requests or server.is_gone:
            return
        if not server.is_dead and (server.is_paused or not self.answers(server)):
            self.timeline.later(1.0, lambda: self.answer(server, id))
            return
        version = server.requests.pop(id)
        has_other = server.weights not in (version, server.state.version) and not server.state.is_frozen
        if (server.is_dead or has_other) and server.state.phase == "serving" and not server.state.is_frozen:
            expected, found = server.state.version, "nothing answers" if server.is_dead else server.weights
            self.timeline.later(self.random.uniform(0.0, 0.5), lambda: self.found(server, expected, found))

    def found(self, server: Server, expected: str, version: str) -> None:
        """It was asked for its version because a request went wrong."""
        if not (server.is_gone or self.has_left) and server.state.version == expected:
            self.apply("version_found", server, version)

    # --- announcements ---

    def announce(self) -> None:
        """A new version, in whatever the engines are at."""
        self.num_steps += 1
        self.announced = f"L:{self.num_steps}"
        self.sync()

    def sync(self) -> None:
        """Pull and publish, unless that is being done."""
        if self.is_syncing or self.has_left or self.serving == self.announced:
            return
        self.is_syncing = True
        self.timeline.later(self.random.uniform(0.01, 1.0), lambda: self.publish(self.announced))

    def publish(self, version: str) -> None:
        """As EnginePool.update_weights."""
        if self.has_left:
            return
        self.serving = ""
        self.loads_of_round = []
        for action in self.apply("publish", text=version):
            load = self.servers[action.engine].load
            require(load is not None, f"{action.engine.url} is loaded, and nothing is under way")
            self.loads_of_round += [load] if load else []
        self.end_round(version)

    def end_round(self, version: str) -> None:
        """Once each of its loads has ended: whether it is served."""
        under_way = [server.load for server in self.servers.values()]
        if any(load in under_way for load in self.loads_of_round):
            self.timeline.later(0.1, lambda: self.end_round(version))
            return
        self.is_syncing = False
        if any(state.serves(version) for state in self.pool.policy):
            self.serving = version
        self.timeline.later(0.0 if self.serving else SYNC_RETRY_S, self.sync)

    # --- what the machine has done ---

    def do_load(self, server: Server, version: str) -> None:
        """Pause, load, verify, go on; or fail at any step."""
        require(server.load is None, f"{server.state.url} is given {version} while it is given {server.load and server.load.version}")
        require(not server.state.is_frozen, f"{server.state.url} has weights of its own")
        is_as_known = server.state.version in ("", server.weights) or server.was_restarted or server.is_dead
        require(is_as_known, f"{server.state.url} is given what changed since {server.state.version}, but has {server.weights}")
        load = server.load = Load(version)
        server.load_since = self.now
        self.timeline.later(self.random.uniform(0.001, 0.5), lambda: self.begin_load(server, load))

    def begin_load(self, server: Server, load: Load) -> None:
        """It is paused, and has the weights of two versions from now on."""
        if load.is_cancelled:
            return
        if not self.answers(server):
            self.timeline.later(self.random.choice((0.1, CALL_TIMEOUT_S)), lambda: self.end_load(server, load, "it does not answer"))
            return
        server.is_paused, server.weights, server.was_restarted = True, TORN, False
        self.timeline.later(self.random.choice((0.05, 1.0, 8.0)), lambda: self.end_load(server, load, ""))

    def end_load(self, server: Server, load: Load, failure: str) -> None:
        """It has the version, or refuses it, or cannot be reached."""
        if load.is_cancelled:
            return
        if not failure and not self.answers(server):
            self.timeline.later(CALL_TIMEOUT_S, lambda: self.end_load(server, load, "it stopped answering"))
            return
        if not failure and not self.is_calm and self.random.random() < 0.1 * self.roughness:
            self.faults["refused"] += 1
            failure = "it refused the weights"
        if not failure and server.weights != TORN:  # its process is another one since
            failure = f"it reports weights {server.weights}"
        server.load = None
        if failure:
            self.apply("load_failed", server, failure)
        else:
            server.is_paused, server.weights = False, load.version
            self.apply("load_verified", server, load.version)

    def do_cancel_load(self, server: Server, text: str) -> None:
        """Nothing is heard of it any more."""
        require(server.load is not None, f"{server.state.url} has no load that could be cancelled")
        if server.load is not None:
            server.load.is_cancelled = True
        server.load = None

    def do_replace(self, server: Server, text: str) -> None:
        """Another process, of those that are ours."""
        server.generation += 1
        if server.state.is_owned:
            require(not server.requests, f"{server.state.url} is replaced while it has requests that nobody ended")
            server.weights, server.is_paused, server.is_dead, server.hung_until, server.was_restarted = "default", False, False, 0.0, False
            server.silent_since = -1.0
        self.start(server)

    def do_end_requests(self, server: Server, text: str) -> None:
        """Their groups are given back."""
        server.requests.clear()

    def do_abort_requests(self, server: Server, text: str) -> None:
        """Their callers get what there is, once the engine has answered."""

        def aborted() -> None:
            if server.is_gone or self.has_left:
                return
            if server.requests and (server.is_paused or not self.answers(server)):
                self.timeline.later(0.5, aborted)
                return
            server.requests.clear()
            self.apply("requests_ended", server)

        self.timeline.later(self.random.uniform(0.05, 2.0), aborted)

    def do_resume(self, server: Server, text: str) -> None:
        """It goes on, where it can be reached."""
        server.is_paused = False

    def do_remove(self, server: Server, text: str) -> None:
        """It is no engine of this worker any more."""
        require(not server.requests and server.load is None, f"{server.state.url} is removed in the middle of something")
        require(server.state.is_owned or not server.is_paused, f"{server.state.url} is detached and stays paused")
        server.is_gone = True

    def do_lost(self, server: Server, text: str) -> None:
        """As WeightSync.invalidate."""
        self.serving = ""
        self.timeline.later(0.0, self.sync)

    # --- what goes wrong ---

    def fail_something(self) -> None:
        """One of the faults, or a command."""
        server = self.random.choice([server for server in self.servers.values() if not server.is_gone])
        fault = self.random.choice((self.hang, self.hang, self.die, self.restart, self.attach, self.detach))
        self.faults[fault.__name__] += 1
        self.note(f"!! {fault.__name__} {server.state.url}")
        fault(server)

    def hang(self, server: Server) -> None:
        """It answers nothing, for a moment or for long."""
        server.hung_until = self.now + self.random.choice((2.0, 8.0, 45.0, 300.0))

    def die(self, server: Server) -> None:
        """Its process ends; others start an attached one again."""
        server.is_dead, server.requests = True, {} if server.state.phase != "serving" else server.requests
        if not server.state.is_owned:
            self.timeline.later(self.random.uniform(1.0, 60.0), lambda: self.go_on(server))

    def restart(self, server: Server) -> None:
        """Somebody starts an attached engine again, or gives it other weights, too quickly for a probe to notice."""
        if not server.state.is_owned and not server.is_dead:
            server.weights, server.is_paused, server.was_restarted = "default", False, True

    def attach(self, server: Server) -> None:
        """By command."""
        if len(self.pool.engines) < 4:
            self.add(is_owned=False, is_attached_later=True)

    def detach(self, server: Server) -> None:
        """By command."""
        try:
            self.apply("detach", server)
            server.draining_since = self.now
        except UsageError:
            self.note("    refused")

    def go_on(self, server: Server) -> None:
        """It works again; an attached one that had ended has none of our weights."""
        server.hung_until = 0.0
        if server.is_dead and not server.state.is_owned:
            server.is_dead, server.is_paused, server.weights, server.was_restarted = False, False, "default", True

    def leave(self) -> None:
        """The worker ends."""
        self.has_left = True
        self.apply("leave")
        for server in self.servers.values():
            is_ours = server.state.is_owned or server.is_gone
            require(is_ours or not server.is_paused, f"{server.state.url} is left paused by a worker that ended")
            require(server.load is None, f"{server.state.url} is still loaded by a worker that ended")

    # --- what must hold ---

    def is_well(self) -> bool:
        """Whether everything serves the newest version; requests find out about engines that have other weights."""
        if self.is_calm and self.random.random() < 0.1:
            self.send()
        policy = self.pool.policy
        is_served = all(state.serves(self.announced) and self.servers[state].weights == self.announced for state in policy)
        return is_served and self.serving == self.announced and all(state.phase == "serving" for state in self.pool.engines)

    def told(self) -> str:
        """For errors."""
        return "; ".join(f"{s.url} {s.phase} {s.version} loading {s.loading or 'nothing'}, silent {s.silent}" for s in self.pool.engines)

    def check(self) -> None:
        """After each event."""
        has_newest = any(state.serves(self.pool.newest) for state in self.pool.policy)
        self.newest_since = min(self.newest_since, self.now) if has_newest else float("inf")
        for state, server in self.servers.items():
            if state not in self.pool.engines:
                continue
            who = f"{state.url}, {state.phase}"
            if state.phase == "serving" and not (state.is_frozen or server.was_restarted or server.is_dead):
                require(server.weights == state.version != "", f"{who}: it has {server.weights}, not {state.version!r}")
            if state.phase in ("starting", "syncing", "sick"):
                require(not server.requests, f"{who}: it is out of service and has requests")
            require((server.load is not None) == bool(state.loading), f"{who}: it is loading {state.loading!r}, really {server.load}")
            self.check_that_it_ends(state, server, who, has_newest=has_newest)

    def check_that_it_ends(self, state: EngineState, server: Server, who: str, *, has_newest: bool) -> None:
        """Nothing lasts without something that ends it."""
        if self.answers(server) or state.phase == "starting":
            server.silent_since = -1.0
        elif server.silent_since < 0:
            server.silent_since = self.now
        if server.silent_since >= 0 and self.now > server.silent_since + HANG_NOTICED_S:
            require(not state.is_in_service, f"{who}: it has not answered since {server.silent_since:.1f} s")
            require(
                not state.is_owned or state.phase == "draining", f"{who}: it hangs since {server.silent_since:.1f} s and is not replaced"
            )
        if state.loading and has_newest and server.silent_since >= 0 and state.phase != "draining":
            since = max(server.silent_since, server.load_since, self.newest_since)
            require(self.now <= since + HELD_UP_S + PROBE_S, f"{who}: others have waited for it since {since:.1f} s")
        if state.phase == "draining":
            require(self.now <= server.draining_since + DRAIN_S, f"{who}: it is detached since {server.draining_since:.1f} s")
        if server.draining_since:
            require(state.phase == "draining", f"{who}: it was detached, and has returned")
        if state.phase == "sick" and has_newest and not (state.loading or state.silent or state.is_frozen):
            require(state.deadline is not None, f"{who}: nobody gives it {self.pool.newest}")
