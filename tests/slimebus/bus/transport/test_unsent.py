"""The budget of bytes that slow peers may hold."""

import zmq
from waiting import wait_until

from slimebus.bus.transport.unsent import Unsent


class Held(Unsent):
    """A budget whose frames are released by hand."""

    def hand_over(self, peer: bytes, size: int) -> zmq.Frame:
        assert self.has_room(peer, size)
        return self.frame(peer, bytearray(10), size)


def test_all_together_have_the_limit_but_everyone_may_have_one() -> None:
    unsent = Held(100)
    kept = [unsent.hand_over(b"slow", 60)]
    kept.append(unsent.hand_over(b"slow", 40))
    assert not unsent.has_room(b"slow", 1)
    kept.append(unsent.hand_over(b"trainer", 500))
    assert not unsent.has_room(b"trainer", 1)
    assert unsent.total_bytes == 600
    unsent.reclaim(b"trainer")
    assert unsent.total_bytes == 100


def test_what_is_sent_makes_room_again() -> None:
    with zmq.Context() as context, context.socket(zmq.PAIR) as a, context.socket(zmq.PAIR) as b:
        a.linger = b.linger = 0
        a.bind("inproc://unsent")
        b.connect("inproc://unsent")
        unsent = Unsent(100)
        assert unsent.has_room(b"p", 90)
        a.send(unsent.frame(b"p", bytearray(90), 90), copy=False)
        assert not unsent.has_room(b"p", 20)
        assert len(b.recv()) == 90
        wait_until("room", lambda: not unsent.total_bytes)
        assert unsent.has_room(b"p", 20)
