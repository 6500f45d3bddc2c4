"""Who waits for the status: one document, made seldom enough to cost others little, answers all who asked meanwhile."""

from collections.abc import Callable
from typing import Any

import msgspec

from broker.state.effects import Address
from broker.suspend_tolerant_clock import Clock
from slimebus.bus.messages import Error, StatusReply
from slimebus.bus.transport.server import Server

TIMES_COST, MAX_PAUSE_S = 20, 0.5
"""After a status come so many times the seconds that it took, at most MAX_PAUSE_S, before the next one: it costs a twentieth."""
ONE_AT_A_TIME = "the status that this connection asked for before is on its way: one at a time"


class StatusAskers:
    """The requests that wait for the next document. Used by one thread. document: makes it."""

    def __init__(self, server: Server, clock: Clock, document: Callable[[], dict[str, Any]]) -> None:
        self._server, self._clock, self._document = server, clock, document
        self._waiting: dict[bytes, int] = {}
        self._next_at = float("-inf")

    def add(self, to: Address) -> None:
        """Answer this request with the next document; a peer that has another one unanswered, or unread, is refused."""
        if self._server.has_unread(to.peer) or self._waiting.setdefault(to.peer, to.request) != to.request:
            self._server.answer(to.peer, to.request, Error(code="busy", text=ONE_AT_A_TIME, retryable=True), is_excess=True)

    @property
    def due_s(self) -> float:
        """Seconds until somebody is to be answered."""
        return max(0.0, self._next_at - self._clock.monotonic()) if self._waiting else float("inf")

    def answer(self, *, is_last: bool = False) -> None:
        """Answer all who wait, where the time has come, or `is_last`."""
        started = self._clock.monotonic()
        if not self._waiting or (started < self._next_at and not is_last):
            return
        frame = msgspec.json.encode(self._document())
        waiting, self._waiting = self._waiting, {}
        for peer, request in waiting.items():
            self._server.answer(peer, request, StatusReply(), [frame])
        ended = self._clock.monotonic()
        self._next_at = ended + min(MAX_PAUSE_S, TIMES_COST * (ended - started))
