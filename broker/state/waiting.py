"""Requests that wait for their answer. Each has one deadline, set when it is first asked; no repeat of it moves it."""

from typing import Generic, TypeVar

import msgspec

from broker.state.effects import Address, Event
from broker.state.timers import Timers
from slimebus.bus.messages import NO_VERSION, Batch, Evaluate, Lease, Read

K = TypeVar("K")
M = TypeVar("M", Lease, Batch, Read, Evaluate)


Kind = tuple[str, int, bool]
"""Of a lease request: lineage and version that its worker serves, and whether that matters. Requests of a kind have one answer."""
ANY_KIND: Kind = ("", NO_VERSION, True)


class Waiting(msgspec.Struct, Generic[M], kw_only=True):
    """One request that waits, and until when at the longest."""

    to: Address
    client: str
    message: M
    deadline: float
    kind: Kind


class WaitingRequests(dict[K, Waiting[M]], Generic[K, M]):
    """The waiting requests of one kind. When a deadline comes, the timer `(name, key)` falls due and the request is answered with why."""

    def __init__(self, name: str, timers: Timers) -> None:
        super().__init__()
        self.name, self._timers = name, timers
        self._by_client: dict[str, dict[K, None]] = {}
        self.by_kind: dict[Kind, dict[K, None]] = {}

    def park(self, key: K, event: Event, message: M, now: float, kind: Kind = ANY_KIND) -> None:
        """Have a request wait. The same request again keeps its deadline; another one of this key takes its place."""
        earlier = self.take_out(key)
        deadline = earlier.deadline if earlier is not None and earlier.to == event.to else now + message.wait_s
        self[key] = Waiting(to=event.to, client=event.sender, message=message, deadline=deadline, kind=kind)
        self._by_client.setdefault(event.sender, {})[key] = None
        self.by_kind.setdefault(kind, {})[key] = None
        self._timers.set((self.name, key), deadline)

    def take_out(self, key: K) -> Waiting[M] | None:
        """Take a request out, to be answered; None when it does not wait any more."""
        waiting = self.pop(key, None)
        if waiting is not None:
            self._timers.cancel((self.name, key))
            _discard(self.by_kind, waiting.kind, key)
            _discard(self._by_client, waiting.client, key)
        return waiting

    def change_version(self, client: str, lineage: str, version: int) -> None:
        """A worker serves another version: its requests are of another kind."""
        for key in self._by_client.get(client, ()):
            waiting = self[key]
            if waiting.kind[:2] != (lineage, version):
                _discard(self.by_kind, waiting.kind, key)
                waiting.kind = (lineage, version, waiting.kind[2])
                self.by_kind.setdefault(waiting.kind, {})[key] = None

    def one_of_each_kind(self) -> list[Waiting[M]]:
        """One request of each kind: the last, for a dictionary that loses its first ones takes long to find the next first."""
        return [self[next(reversed(keys))] for keys in self.by_kind.values()]

    def asked_by(self, client: str) -> list[K]:
        """The keys of a client's requests."""
        return list(self._by_client.get(client, ()))


G = TypeVar("G")


def _discard(index: dict[G, dict[K, None]], group: G, key: K) -> None:
    del index[group][key]
    if not index[group]:
        del index[group]
