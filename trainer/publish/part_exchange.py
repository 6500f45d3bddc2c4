"""What publishing ranks tell each other beside training, from threads that must not use its collectives.

rank r:   post(v, part)  --> the store of torch's rendezvous -->  rank 0: collect(v) from every r
rank 0:   end()          -->                                 -->  rank r: is_ended
"""

import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from torch.distributed import HashStore, TCPStore

from slimebus.bus.errors import FatalWeightsError, WeightsError
from slimebus.weights.store.version_store import VersionInfo

log = logging.getLogger("trainer")

PIECE_BYTES = 4 << 20
"""The store takes 8 MiB as one value; a part of 100,000 tensors is larger."""
POLL_S, SLOW_POLL_S = 0.01, 0.2
"""Looked for, not waited for in the store: its waits end with a page of warnings."""
LOG_INTERVAL_S = 30.0


class RankPartReport(msgspec.Struct, kw_only=True):
    """One rank's share of a version, complete and served at `address`: what its store made. problem: why there is none.

    wait_s, copy_s: how long it held the step up, for the version before it and to gather and copy its tensors.
    """

    address: str = ""
    made: VersionInfo | None = None
    wait_s: float = 0.0
    copy_s: float = 0.0
    problem: str = ""


class PartExchange:
    """The parts of the versions of one lineage. Each process has its own connection to the store, used by one thread at a time."""

    def __init__(self, store: Any, lineage: str) -> None:
        """store: torch's; it takes bytes, though its stubs say str."""
        self._store, self._lineage = store, lineage
        self._closing = threading.Event()

    @classmethod
    def in_process(cls) -> "PartExchange":
        """For a rank that publishes alone: nobody else reads it."""
        return cls(HashStore(), "")

    @classmethod
    def among_ranks(cls, lineage: str) -> "PartExchange":
        """On the store through which torch's ranks found each other, over a connection of its own: nothing new listens."""
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return cls(TCPStore(host, port, is_master=False, wait_for_workers=False), lineage)

    def post(self, version: int, rank: int, part: RankPartReport) -> None:
        """Tell rank 0 of this rank's part."""
        encoded, key = msgspec.msgpack.encode(part), self._key(version, rank)
        starts = range(0, len(encoded), PIECE_BYTES)
        for number, start in enumerate(starts):
            self._store.set(f"{key}/{number}", encoded[start : start + PIECE_BYTES])
        self._store.set(key, str(len(starts)))

    def collect(self, version: int, ranks: Sequence[int], timeout_s: float) -> list[RankPartReport]:
        """The parts of these ranks, in their order. Raises WeightsError for one that failed or did not come within timeout_s seconds."""
        deadline = time.monotonic() + timeout_s
        return [self._await_part(version, rank, deadline) for rank in ranks]

    def end(self) -> None:
        """The run is over: nobody pulls any more."""
        self._store.set(f"{self._lineage}/end", "1")

    def wait_for_end(self, timeout_s: float) -> bool:
        """True once rank 0 has said that nobody pulls any more, or has left; False after timeout_s seconds."""
        deadline = time.monotonic() + timeout_s
        try:
            while not self._store.check([f"{self._lineage}/end"]):
                if time.monotonic() >= deadline:
                    return False
                self._closing.wait(SLOW_POLL_S)
        except RuntimeError:  # the store went with the process that held it
            log.debug("the store of the ranks is gone")
        return True

    def close(self) -> None:
        """End a `collect` that another thread waits in."""
        self._closing.set()

    def _await_part(self, version: int, rank: int, deadline: float) -> RankPartReport:
        key = self._key(version, rank)
        started = said = time.monotonic()
        while not self._store.check([key]):
            self._closing.wait(POLL_S)
            now = time.monotonic()
            if self._closing.is_set():
                raise WeightsError(f"version {version} is not announced; this trainer is leaving")
            if now >= deadline:
                waited = f"rank {rank} did not complete its part in {now - started:.0f} s; see that rank's log"
                raise FatalWeightsError(f"version {version} is not announced: {waited}")
            if now - said > LOG_INTERVAL_S:
                said = now
                log.warning("version %d waits for the part of rank %d, for %.0f s so far", version, rank, now - started)
        part = self._read_part(key)
        if part.problem:
            raise FatalWeightsError(f"version {version} is not announced: rank {rank} has no part of it: {part.problem}")
        return part

    def _read_part(self, key: str) -> RankPartReport:
        pieces = [f"{key}/{number}" for number in range(int(self._store.get(key)))]
        encoded = b"".join(map(self._store.get, pieces))
        for name in (key, *pieces):
            self._store.delete_key(name)
        return msgspec.msgpack.decode(encoded, type=RankPartReport)

    def _key(self, version: int, rank: int) -> str:
        return f"{self._lineage}/{version}/{rank}"
