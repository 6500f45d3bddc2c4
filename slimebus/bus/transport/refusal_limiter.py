"""How much nonsense a peer may send before it is not listened to for a while.

An honest peer is refused now and then: after a fencing, or when it lost its broker. One that is refused a hundred times in a few seconds is
broken or hostile, and answering it takes time from everyone else. What it sends meanwhile is counted and dropped unread; requests are
sent again until they are answered, so an honest one loses seconds and nothing else.
"""

import time
from collections.abc import Callable

LIMIT = 100
WINDOW_S = 5.0
"""As long as a client waits before it sends a request again."""
MAX_PEERS = 4096


class RefusalLimiter:
    """Refusals of each peer in the present window of time. A bounded table: when it is full the window ends early."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._refusals: dict[bytes, int] = {}
        self._window_ends = 0.0

    def refused(self, peer: bytes) -> bool:
        """Count a refusal; True when this one reaches the limit."""
        if self.clock() >= self._window_ends or len(self._refusals) >= MAX_PEERS:
            self._refusals.clear()
            self._window_ends = self.clock() + WINDOW_S
        count = self._refusals[peer] = self._refusals.get(peer, 0) + 1
        return count == LIMIT

    def is_silenced(self, peer: bytes) -> bool:
        """True while a peer is not listened to."""
        if not self._refusals or self._refusals.get(peer, 0) < LIMIT:
            return False
        return self.clock() < self._window_ends
