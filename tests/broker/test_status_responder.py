"""The status is made seldom, for all who ask at once, and each has one answer on its way."""

from collections.abc import Sequence
from typing import Any

import pytest
from manual_clock import ManualClock

from broker.request_loop import MAX_STATUS_PAUSE_S, PAUSE_TO_COST, StatusResponder
from broker.state.effects import Address
from slimebus.bus import messages as m


class Desk:
    """Askers of a server that only notes what it was to answer. cost_s: what making a document takes."""

    def __init__(self, cost_s: float) -> None:
        self.clock, self.cost_s, self.documents = ManualClock(), cost_s, 0
        self.deaf: set[bytes] = set()
        self.sent: list[tuple[bytes, int, str]] = []
        self.askers: Any = StatusResponder(self, self.clock, self._document)  # type: ignore[arg-type]

    def _document(self) -> dict[str, Any]:
        self.documents += 1
        self.clock.now += self.cost_s
        return {"number": self.documents}

    def has_unread(self, peer: bytes) -> bool:
        return peer in self.deaf

    def answer(self, peer: bytes, request: int, message: m.Message, bulk: Sequence[bytes] = (), *, is_excess: bool = False) -> None:
        assert is_excess == isinstance(message, m.Error)
        self.sent.append((peer, request, message.code if isinstance(message, m.Error) else bulk[0].decode()))

    def ask(self, *requests: tuple[bytes, int]) -> list[tuple[bytes, int, str]]:
        """What is answered in a burst with these requests."""
        self.sent = []
        for peer, number in requests:
            self.askers.add(Address(peer, number))
        self.askers.answer()
        return self.sent


ONE, TWO = '{"number":1}', '{"number":2}'


def test_who_asks_first_is_answered_at_once_and_who_asks_meanwhile_shares_the_next_document() -> None:
    desk = Desk(cost_s=0.001)
    assert desk.ask((b"a", 1), (b"b", 1)) == [(b"a", 1, ONE), (b"b", 1, ONE)]
    assert desk.ask((b"a", 2)) == []
    assert desk.ask((b"b", 7)) == []
    assert desk.askers.due_s == pytest.approx(PAUSE_TO_COST * 0.001)
    desk.clock.now += PAUSE_TO_COST * 0.001
    assert desk.ask() == [(b"a", 2, TWO), (b"b", 7, TWO)]
    assert desk.askers.due_s == float("inf"), "nobody waits"


def test_a_dear_status_is_made_twice_a_second() -> None:
    desk = Desk(cost_s=0.1)
    desk.ask((b"a", 1))
    desk.ask((b"a", 2))
    assert desk.askers.due_s == pytest.approx(MAX_STATUS_PAUSE_S)
    desk.clock.now += 10
    assert desk.ask() == [(b"a", 2, TWO)]


def test_a_second_request_of_a_peer_is_refused_and_a_repeated_one_is_the_same() -> None:
    desk = Desk(cost_s=0.01)
    desk.ask((b"a", 1))
    assert desk.ask((b"a", 2), (b"a", 2), (b"a", 3)) == [(b"a", 3, "busy")]
    desk.clock.now += 10
    assert desk.ask() == [(b"a", 2, TWO)]


def test_who_has_not_taken_its_last_answer_gets_no_other() -> None:
    desk = Desk(cost_s=0.01)
    desk.deaf.add(b"a")
    assert desk.ask((b"a", 1), (b"b", 1)) == [(b"a", 1, "busy"), (b"b", 1, ONE)]
    assert desk.documents == 1


def test_a_broker_that_ends_leaves_nobody_waiting() -> None:
    desk = Desk(cost_s=0.01)
    desk.ask((b"a", 1))
    desk.ask((b"a", 2))
    desk.askers.answer(is_last=True)
    assert desk.sent == [(b"a", 2, TWO)]
