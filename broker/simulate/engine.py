"""A worker's engine: samples share its speed, and each sample knows which version made which of its tokens."""

import heapq
import random
from collections import Counter

from broker.simulate.workload import Workload


class SimulatedGroup:
    """A leased group in the making. tokens, runs (version -> tokens) and oldest (version -> samples with it as their oldest) are of the
    samples done so far.
    """

    __slots__ = ("id", "is_evaluated", "lease", "oldest", "open", "runs", "tokens")

    def __init__(self, id: str, lease: int, samples: int, *, is_evaluated: bool = False) -> None:
        self.id, self.lease, self.is_evaluated, self.open, self.tokens = id, lease, is_evaluated, samples, 0.0
        self.runs: dict[int, float] = {}
        self.oldest: Counter[int] = Counter()


class SimulatedEngine:
    """Processor sharing: with n samples each gets `workload.speed(n)`. Service is counted in tokens that a sample got since the start.

    `now` is that of the clock of work.
    """

    def __init__(self, workload: Workload, rng: random.Random) -> None:
        self.workload, self.random = workload, rng
        self.made = self._service = self._at = 0.0
        self._running: list[tuple[float, int, float, SimulatedGroup]] = []
        self._serial = 0
        self._switches: list[tuple[float, int]] = []
        """(service at that time, version) of each version taken up, oldest first; samples that run now began after the first."""

    def take_version(self, version: int, now: float, *, load_s: float = 0.0) -> None:
        """Tokens from now on are of this version; none is made while it is loaded."""
        self._advance(now)
        self._at += load_s
        self._switches.append((self._service, version))
        began = min((begin for _, _, begin, _ in self._running), default=self._service)
        while len(self._switches) > 1 and self._switches[1][0] <= began:
            del self._switches[0]

    def begin(self, group: SimulatedGroup, version: int, now: float) -> None:
        """Start all samples of a group with the version served now."""
        if not self._running:
            self.take_version(version, now)
        self._advance(now)
        for _ in range(group.open):
            length = self.workload.length(self.random)
            self._serial += 1
            heapq.heappush(self._running, (self._service + length, self._serial, self._service, group))

    def next_at(self) -> float:
        """When the next sample is done; infinity when none runs."""
        if not self._running:
            return float("inf")
        return self._at + (self._running[0][0] - self._service) / self.workload.speed(len(self._running))

    def finish_next(self, now: float) -> SimulatedGroup | None:
        """End the sample that is due; its group once that has no other."""
        self._advance(now)
        end, _, begin, group = heapq.heappop(self._running)
        self._service = max(self._service, end)
        group.open -= 1
        self._count_tokens(group, begin, end)
        return None if group.open else group

    def _count_tokens(self, group: SimulatedGroup, begin: float, end: float) -> None:
        group.tokens += end - begin
        self.made += end - begin
        is_first = True
        for i, (since, version) in enumerate(self._switches):
            until = self._switches[i + 1][0] if i + 1 < len(self._switches) else end
            if (made := min(end, until) - max(begin, since)) > 0:
                group.runs[version] = group.runs.get(version, 0.0) + made
                group.oldest[version] += is_first
                is_first = False

    def _advance(self, now: float) -> None:
        if self._running and now > self._at:
            self._service += (now - self._at) * self.workload.speed(len(self._running))
        self._at = max(self._at, now)
