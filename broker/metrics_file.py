"""The broker's metrics file: JSON lines. A full disk delays rows, it does not end the broker."""

import logging
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from slimebus.clock import Clock

log = logging.getLogger("slimebus.broker")

MAX_WAITING = 4096
"""Rows kept in memory while the file cannot be written; beyond that the oldest is dropped, counted and logged."""


class MetricsFile:
    """Rows appended to `path`, each with the time; None writes nothing."""

    def __init__(self, path: Path | None, clock: Clock) -> None:
        self.path, self.clock, self.num_dropped = path, clock, 0
        self._waiting: deque[bytes] = deque()

    def add(self, row: dict[str, Any]) -> None:
        """Write a row, and those that could not be written before it."""
        if self.path is None:
            return
        self._waiting.append(msgspec.json.encode({"time": self.clock.wall(), **row}) + b"\n")
        self.flush()

    def flush(self) -> None:
        """Write what waits; a file that cannot be written is logged once and tried again with the next row."""
        if self.path is None or not self._waiting:
            return
        try:
            self._append(b"".join(self._waiting))
        except OSError as bad:
            if len(self._waiting) == 1:
                log.error("metrics rows cannot be written to %s and wait in memory: %s", self.path, bad)
            while len(self._waiting) > MAX_WAITING:
                self._waiting.popleft()
                self.num_dropped += 1
            return
        self._waiting.clear()
        if self.num_dropped:
            log.warning("%d metrics rows were dropped while %s could not be written", self.num_dropped, self.path)
            self.num_dropped = 0

    def _append(self, lines: bytes) -> None:
        assert self.path is not None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab", buffering=0) as file:
            end = file.tell()
            if file.write(lines) != len(lines):
                file.truncate(end)  # half a line would spoil the one after it
                raise OSError("only a part was written")
