"""A simulated process that talks to the broker as slimebus/bus/transport/client.py does.

Requests are sent again, with the same id, until they are answered or their deadline has come; those with bulk frames after a lost
connection alone. Heartbeats go on beside them; a stopped process (SIGSTOP, swapped out) does and hears everything later; a dead one
does and hears nothing.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from broker.simulate.timeline import Act
from broker.state.effects import Address, Event
from slimebus.bus import messages as m

if TYPE_CHECKING:
    from simulation.world import World

RUN = "sim"
RETRY_S = 0.5
PATIENT_CODES = ("disk_full", "store")
MAX_RECONNECTS = 8
"""Under way at once. Each sends all bulk again, and each of those messages may be lost: behind a cut network they would never stop."""
POWER_CUTS, HALF_OPEN_S = 0.2, 20.0
"""Share of the deaths in which the whole machine ends, so that nobody closes its connection; ZeroMQ's heartbeats do after so long."""
TIMEOUT_RESENDS = 12
"""A request is given up after so many times the client sends it again, beyond what the broker may keep it waiting."""

Done = Callable[[Any, list[Any]], None]


class Broken(AssertionError):
    """A promise does not hold."""


def require(holds: bool, text: str) -> None:
    """Raise Broken unless `holds`."""
    if not holds:
        raise Broken(text)


class Request:
    """One request that waits for its answer."""

    __slots__ = ("asked_at", "bulk", "deadline", "done", "id", "message", "sends", "timeout_s")

    def __init__(self, id: int, message: m.Message, done: Done, bulk: Sequence[bytes], now: float, timeout_s: float) -> None:
        self.id, self.message, self.done, self.bulk, self.sends = id, message, done, bulk, 0
        self.asked_at, self.timeout_s, self.deadline = now, timeout_s, now + timeout_s


class Actor:
    """A process with a name that may be reused and an instance that is its own."""

    role = ""

    def __init__(self, world: "World", name: str, *, take_over: bool = False) -> None:
        self.world, self.name, self.take_over = world, name, take_over
        self.instance = f"{name[:32]}#{world.timeline.serial()}"
        self.is_dead, self.stopped_until, self.epoch, self.run = False, 0.0, 0, ""
        self._ids = itertools.count(1)
        self._pending: dict[int, Request] = {}
        self._is_beating = False
        self._num_reconnects = 0
        world.processes[self.instance.encode()] = self
        self.hello()

    # --- life ---

    def die(self) -> None:
        """End without a word."""
        self.is_dead = True
        peer = self.instance.encode()
        if self.world.processes.pop(peer, None) is not None and not self.world.is_calm and self.world.random.random() < POWER_CUTS:
            self.world.half_open[peer] = self.world.now + HALF_OPEN_S
        self._pending.clear()

    def stop_for(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after a while."""
        self.stopped_until = max(self.stopped_until, self.world.now + seconds)

    def leave(self) -> None:
        """Say goodbye and end."""
        if not self.epoch:
            self.die()
        elif not self.is_dead:
            self.ask(m.Goodbye(), lambda *_: self.die())
            self.later(3 * self.world.scenario.resend_s, self.die)

    def later(self, delay_s: float, act: Act) -> None:
        """Do something after a delay by its own clock, unless dead by then; when stopped, as soon as it goes on."""
        self.world.timeline.later(delay_s / self.world.clock_rates.get(self.name, 1.0), lambda: self._when_awake(act))

    def _when_awake(self, act: Act) -> None:
        if self.is_dead:
            return
        if self.world.now < self.stopped_until:
            self.later(self.stopped_until - self.world.now, act)
        else:
            act()

    # --- requests ---

    def ask(self, message: m.Message, done: Done, bulk: Sequence[bytes] = (), *, timeout_s: float = 0.0) -> None:
        """Send a request until it is answered; `done` gets the answer, `refused` an error that no repetition helps."""
        timeout_s = (timeout_s or TIMEOUT_RESENDS * self.world.scenario.resend_s) + getattr(message, "wait_s", 0.0)
        request = Request(next(self._ids), message, done, bulk, self.world.now, timeout_s)
        self._pending[request.id] = request
        self._send(request)

    def _send(self, request: Request) -> None:
        if request.id not in self._pending:
            return
        if self.world.now >= request.deadline:
            del self._pending[request.id]
            self.unreachable(request)
            return
        self.world.trace(f"{self.name} asks {request.id} {m.wire_name(type(request.message))}")
        event = Event(
            to=Address(self.instance.encode(), request.id),
            sender=self.name,
            epoch=self.epoch,
            run=self.run,
            message=request.message,
            bulk=request.bulk,
        )
        self.world.network.carry(self.name, lambda: self.world.broker.deliver(event), self.reconnect)
        self._resend_in(request, request.deadline - self.world.now if request.bulk else self.world.scenario.resend_s)

    def reconnect(self) -> None:
        """The connection is lost: a while later there is another one, and what has bulk frames is sent again."""
        if self._num_reconnects >= MAX_RECONNECTS:
            return
        self._num_reconnects += 1

        def send_bulk() -> None:
            self._num_reconnects -= 1
            for request in list(self._pending.values()):
                if request.bulk:
                    self._send(request)

        self.later(self.world.random.uniform(0.1, 5.0), send_bulk)

    def _resend_in(self, request: Request, delay_s: float) -> None:
        request.sends += 1
        turn = request.sends
        self.later(delay_s, lambda: self._send(request) if request.sends == turn else None)

    def hear(self, request_id: int, message: m.Message, bulk: list[Any]) -> None:
        """An answer arrives; all but the first are ignored."""
        self._when_awake(lambda: self._hear(request_id, message, bulk))

    def _hear(self, request_id: int, message: m.Message, bulk: list[Any]) -> None:
        request = self._pending.get(request_id)
        if request is None:
            return
        if isinstance(message, m.Error) and message.retryable:
            if message.code in PATIENT_CODES:
                request.deadline = self.world.now + request.timeout_s
            self._resend_in(request, RETRY_S)
            return
        del self._pending[request_id]
        if isinstance(message, m.Error):
            self.world.trace(f"{self.name} is refused: {message.code}: {message.text}")
            self.refused(message, request)
        else:
            request.done(message, bulk)

    def crash(self) -> None:
        """End; whoever looks after it may start it again."""
        self.die()

    # --- membership ---

    def hello(self) -> None:
        """Join, or join again."""
        self.epoch = 0
        self.ask(m.Hello(role=self.role, instance=self.instance, take_over=self.take_over), self._welcomed)

    def _welcomed(self, welcome: m.Welcome, _: list[Any]) -> None:
        is_first, self.epoch, self.run, self.take_over = not self._is_beating, welcome.epoch, welcome.run, False
        if is_first:
            self._is_beating = True
            self.begin(welcome)
            self._beat()

    def _beat(self) -> None:
        self.beat_now()
        self.later(self.world.rules.heartbeat_s, self._beat)

    def beat_now(self) -> None:
        """Send a heartbeat beside the regular ones."""
        self.ask(self.beat(), lambda reply, _: self.beaten(reply), timeout_s=4 * self.world.rules.heartbeat_s)

    # --- what each role does ---

    def begin(self, welcome: m.Welcome) -> None:
        """Start working: the broker has taken us in."""

    def beat(self) -> m.Heartbeat:
        """What a heartbeat says."""
        return m.Heartbeat()

    def beaten(self, reply: m.HeartbeatReply) -> None:
        """A heartbeat is answered."""

    def told(self, hint: m.Hint) -> None:
        """A hint is heard."""

    def unreachable(self, request: Request) -> None:
        """No answer by the deadline: faults explain it, or a broker that has ended, and nothing else."""
        if isinstance(request.message, m.Heartbeat):
            return  # the next one is on its way
        had_calm_s = self.world.now - max(request.asked_at, self.world.scenario.calm_at, self.world.broker.started_at)
        what = m.wire_name(type(request.message))
        is_explained = had_calm_s < request.timeout_s or self.world.broker.is_over
        require(is_explained, f"{self.name} had no answer to {what!r} for {request.timeout_s:.0f} s")
        self.world.trace(f"{self.name} gives up: no answer to {what!r}")
        self.crash()

    def refused(self, error: m.Error, request: Request) -> None:
        """The broker will not do it, now or later."""
        raise Broken(f"{self.name} was refused: {error.code}: {error.text}")
