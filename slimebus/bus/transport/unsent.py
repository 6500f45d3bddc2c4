"""How many bytes of large replies libzmq still holds for peers that are slow to take them.

libzmq counts messages, not bytes, and sends each peer's in order: when it lets go of the last frame of a reply, the whole reply is gone.
"""

from collections import deque
from typing import Any

import zmq

TRACKED_BYTES = 64 << 10
"""Smaller replies are bounded by their number."""


class Unsent:
    """Bytes handed over and not sent, by peer. Used by one thread.

    A peer with nothing unsent may always have one reply, so that nobody is kept waiting by others; beyond that, all together
    have `limit_bytes`.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._by_peer: dict[bytes, deque[tuple[Any, int]]] = {}
        self._total = 0

    @property
    def total_bytes(self) -> int:
        """Bytes that are held now."""
        for peer in list(self._by_peer):
            self._let_go(peer)
        return self._total

    def has_room(self, peer: bytes, size: int) -> bool:
        """True when `size` bytes more may be handed over for this peer."""
        self._let_go(peer)
        return peer not in self._by_peer or self._total + size <= self.limit_bytes or self.total_bytes + size <= self.limit_bytes

    def frame(self, peer: bytes, last: Any, size: int) -> zmq.Frame:
        """The last frame of a reply of `size` bytes, held until it is sent."""
        frame = zmq.Frame(last, track=True, copy=False, copy_threshold=0)
        self._by_peer.setdefault(peer, deque()).append((frame.tracker, size))
        self._total += size
        return frame

    def reclaim(self, peer: bytes) -> None:
        """The reply of the last `frame` was not handed over after all."""
        held = self._by_peer[peer]
        self._total -= held.pop()[1]
        if not held:
            del self._by_peer[peer]

    def _let_go(self, peer: bytes) -> None:
        held = self._by_peer.get(peer)
        while held and held[0][0].done:
            self._total -= held.popleft()[1]
        if held is not None and not held:
            del self._by_peer[peer]
