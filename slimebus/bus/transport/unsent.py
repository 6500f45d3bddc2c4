"""How many bytes of replies libzmq still holds for peers that are slow to take them.

libzmq counts messages, not bytes, and sends each peer's in order: when it lets go of the last frame of a reply, that reply and all before
it are gone. So large replies are tracked, and of small ones the one with which they come to TRACKED_BYTES.
"""

from collections import deque
from typing import Any

import zmq

TRACKED_BYTES = 64 << 10
MAX_PEERS = 4096
"""With so many peers the bytes of their small replies are forgotten, and counted anew."""


class Unsent:
    """Bytes handed over and not sent, by peer: up to TRACKED_BYTES of each, and what is tracked. Used by one thread.

    A peer with nothing unsent may always have one reply, so that nobody is kept waiting by others; beyond that, all together
    have `limit_bytes`.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._by_peer: dict[bytes, deque[tuple[Any, int]]] = {}
        self._small: dict[bytes, int] = {}
        self._total = 0

    @property
    def total_bytes(self) -> int:
        """Bytes that are held now."""
        for peer in list(self._by_peer):
            self._forget_sent(peer)
        return self._total

    def is_tracked(self, peer: bytes) -> bool:
        """True while a reply to this peer that is tracked is not sent."""
        self._forget_sent(peer)
        return peer in self._by_peer

    def to_track(self, peer: bytes, size: int, *, at_once: bool) -> int:
        """The bytes for which the next reply, of `size` bytes, is to be tracked; 0 for not yet. at_once: of any size."""
        size += self._small.get(peer, 0)
        if at_once or size >= TRACKED_BYTES:
            return size
        if len(self._small) >= MAX_PEERS:
            self._small.clear()
        self._small[peer] = size
        return 0

    def has_room(self, peer: bytes, size: int) -> bool:
        """True when `size` bytes more may be handed over for this peer."""
        return not self.is_tracked(peer) or self._total + size <= self.limit_bytes or self.total_bytes + size <= self.limit_bytes

    def frame(self, peer: bytes, last: Any, size: int) -> zmq.Frame:
        """The last frame of a reply, held until it is sent; `size` bytes with all before that is not tracked."""
        self._small.pop(peer, None)
        frame = zmq.Frame(last, track=True, copy=False, copy_threshold=0)
        self._by_peer.setdefault(peer, deque()).append((frame.tracker, size))
        self._total += size
        return frame

    def reclaim(self, peer: bytes) -> None:
        """The reply of the last `frame` was not handed over after all."""
        replies = self._by_peer[peer]
        self._total -= replies.pop()[1]
        if not replies:
            del self._by_peer[peer]

    def _forget_sent(self, peer: bytes) -> None:
        replies = self._by_peer.get(peer)
        while replies and replies[0][0].done:
            self._total -= replies.popleft()[1]
        if replies is not None and not replies:
            del self._by_peer[peer]
