"""Where the time of a version went: seconds of work by stage, from any number of threads."""

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


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
