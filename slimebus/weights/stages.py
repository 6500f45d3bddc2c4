"""Where the time of a version went: seconds of work by stage, from any number of threads."""

import threading
import time
from collections.abc import Mapping


class Stages:
    """Adds up. Work that several threads do at once counts for each, so a sum may exceed the time that passed."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    def __call__(self, name: str) -> "_Stage":
        """What is done inside is of this stage."""
        return _Stage(self, name)

    def _add(self, name: str, seconds: float) -> None:
        with self._lock:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    @property
    def seconds(self) -> Mapping[str, float]:
        """By stage, so far."""
        with self._lock:
            return dict(self._seconds)


class _Stage:
    def __init__(self, stages: Stages, name: str) -> None:
        self._stages, self._name = stages, name

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._stages._add(self._name, time.perf_counter() - self._started)
