"""Where the time of a version went: seconds of work by stage, from any number of threads."""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class Stages:
    """Adds up. Work that several threads do at once counts for each, so a sum may exceed the time that passed."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """What is done inside is of this stage; costs some 2 us."""
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            with self._lock:
                self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    @property
    def seconds(self) -> Mapping[str, float]:
        """By stage, so far."""
        with self._lock:
            return dict(self._seconds)
