"""The network: loses, repeats, delays and so reorders messages; cuts machines off. Calm, it only delays a little."""

import random
from collections.abc import Callable

from broker.simulate.timeline import Act, Timeline

MEAN_DELAY_S = 0.05
LONG_DELAY_S = (2.0, 60.0)
"""A message may arrive long after its sender died, or after its answer was given to another copy."""


class Network:
    """Carries messages between processes. `is_calm` says whether faults are over."""

    def __init__(self, timeline: Timeline, rng: random.Random, is_calm: Callable[[], bool], *, roughness: float) -> None:
        self.timeline, self.random, self.is_calm = timeline, rng, is_calm
        self.loss = self.repeat = 0.05 * roughness
        self.straggle = 0.01 * roughness
        self._cut_until: dict[str, float] = {}

    def cut(self, name: str, seconds: float) -> None:
        """Lose everything to and from a process for a while."""
        self._cut_until[name] = self.timeline.now + seconds

    def carry(self, peer: str, deliver: Act, broke: Act) -> None:
        """Bring a message to or from `peer` and the broker: once, twice or never, soon or late.

        broke: the connection is lost with the message, or before it arrives; the client notices and connects again.
        """
        if self.is_calm():
            self.timeline.later(self._delay_s(), deliver)
            return
        luck = self.random.random()
        if luck < self.loss or self._cut_until.get(peer, 0.0) > self.timeline.now:
            broke()
            return
        for _ in range(2 if luck < self.loss + self.repeat else 1):
            is_late = self.random.random() < self.straggle
            if is_late:
                broke()
            self.timeline.later(self.random.uniform(*LONG_DELAY_S) if is_late else self._delay_s(), deliver)

    def _delay_s(self) -> float:
        return self.random.expovariate(1 / MEAN_DELAY_S)
