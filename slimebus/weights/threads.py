"""Threads for the weights, beside training and generation, and where their time went."""

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

MOST = 8
"""More wait for memory, not for work."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def num_threads(*, shared_by: int = 1) -> int:
    """Half of the cores of this process, shared by so many processes: from 1 to 8."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST, cores // 2 // shared_by))


class Threads:
    """For work of one kind, which may not wait for other work here. pool: None where the caller's own thread does it."""

    def __init__(self, count: int = 1, name: str = "") -> None:
        self.pool = ThreadPoolExecutor(count, name) if count > 1 else None

    def map(self, work: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
        """The results in order. In the caller's thread nothing is done that is not taken."""
        return map(work, items) if self.pool is None or len(items) < 2 else self.pool.map(work, items)

    def submit(self, work: Callable[[Item], Result], item: Item) -> Future[Result]:
        """A future of the result. In the caller's thread it is done when this returns."""
        if self.pool is not None:
            return self.pool.submit(work, item)
        done: Future[Result] = Future()
        done.set_result(work(item))
        return done

    def close(self) -> None:
        """Wait for what has begun."""
        if self.pool is not None:
            self.pool.shutdown()


class Stages:
    """Adds up, in `seconds` by stage. Work that several threads do at once counts for each, so a sum may exceed the time that passed."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._lock = threading.Lock()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """What is done inside is of this stage."""
        started = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self.seconds[name] += time.perf_counter() - started
