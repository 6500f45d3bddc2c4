"""Which fault comes next, and when: decided by a seed alone."""

import random
from typing import Literal

import msgspec

Kind = Literal["kill", "stop", "replace"]
Target = Literal["broker", "worker", "engine", "trainer"]

DECK: list[tuple[Kind, Target]] = [
    ("kill", "broker"),
    ("kill", "worker"),
    ("kill", "engine"),
    ("kill", "trainer"),
    ("stop", "broker"),
    ("stop", "worker"),
    ("stop", "engine"),
    ("stop", "trainer"),
    ("replace", "worker"),
    ("replace", "trainer"),
    ("kill", "broker"),
    ("kill", "worker"),
    ("stop", "worker"),
]
"""kill: -9. stop: SIGSTOP, later SIGCONT. replace: stopped, another of the same name started, and only then continued.

Dealt in random order, each fault once before any comes again. A trainer takes long to start: it is hit less often."""

LONG_STOP = 0.3
"""Share of the stops that outlast a lease."""


class Fault(msgspec.Struct, kw_only=True):
    """One fault. gap_s: how long after the one before; pause_s: until the restart of a killed process or SIGCONT of a stopped one."""

    kind: Kind
    target: Target
    gap_s: float
    pause_s: float
    which: int
    """Which of the workers, modulo their number."""


class Deck:
    """An endless sequence of faults from a seed. mean_gap_s: between faults; long_stop_s: a stop that outlasts every lease."""

    def __init__(self, seed: int, *, mean_gap_s: float, long_stop_s: float) -> None:
        self._chance = random.Random(seed)
        self._mean_gap_s, self._long_stop_s = mean_gap_s, long_stop_s
        self._cards: list[tuple[Kind, Target]] = []

    def draw(self) -> Fault:
        """The next fault."""
        if not self._cards:
            self._cards = list(DECK)
            self._chance.shuffle(self._cards)
        kind, target = self._cards.pop()
        chance = self._chance
        gap_s = min(chance.expovariate(1 / self._mean_gap_s), 3 * self._mean_gap_s)
        is_long = chance.random() < LONG_STOP
        pause_s = chance.uniform(0.0, 1.5)
        if kind == "stop" and is_long:
            pause_s = self._long_stop_s * chance.uniform(1.0, 1.5)
        return Fault(kind=kind, target=target, gap_s=gap_s, pause_s=pause_s, which=chance.randrange(1 << 30))

    def put_back(self, fault: Fault) -> None:
        """A fault that found its target away comes again after all others."""
        self._cards.insert(0, (fault.kind, fault.target))
