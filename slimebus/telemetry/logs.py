"""Logs of a process: one line an event on stderr, `time role level: text`, and no more of one kind than a disk can take."""

import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from slimebus.bus.envelope import one_line
from slimebus.telemetry.metrics import RECORDS_LOG, JsonLines

WARNINGS = (100, 0.5)
"""Lines of one kind at once, and a second after that: 6 MB a day at most."""
NEWS = (1000, 10.0)
"""The same for lines below WARNING: a line for each step of the fastest trainer gets through."""
MAX_KINDS = 1024
KEPT_BYTES, KEPT_CHARS = 1 << 20, 4000
"""Of a file of warnings, and of one of them."""


def set_up(role: str, *, debug: bool = False, run_dir: Path | None = None) -> None:
    """Send logs of this process to stderr; third parties only from WARNING up. Lines of one kind are throttled, except with debug.

    run_dir: warnings and errors are also kept there, for commands that look at the run (RUN_DIR/logs/warnings-ROLE.jsonl).
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter(f"%(asctime)s {role} %(levelname)s: %(message)s", datefmt="%H:%M:%S"))
    if not debug:
        handler.addFilter(Throttle())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    if run_dir is not None:
        root.addHandler(KeptWarnings(run_dir / "logs" / f"warnings-{role}.jsonl", role))
    root.setLevel(logging.WARNING)
    for name in ("slimebus", "broker", "rollout", "trainer", role):
        logging.getLogger(name).setLevel(logging.DEBUG if debug else logging.INFO)


class PrintableFormatter(logging.Formatter):
    """What peers put into a line neither breaks it nor reaches the terminal as a command; a text that breaks its own lines keeps them."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Called by logging."""
        lines = record.message.split("\n") if "\n" in str(record.msg) else [record.message]
        record.message = "\n".join(map(one_line, lines))
        return super().formatMessage(record)


class KeptWarnings(logging.Handler):
    """Appends warnings and errors to a file, a JSON object each."""

    def __init__(self, file: Path, role: str) -> None:
        super().__init__(logging.WARNING)
        self.role, self._rows = role, JsonLines(file, max_bytes=KEPT_BYTES)
        self.addFilter(Throttle())

    def emit(self, record: logging.LogRecord) -> None:
        """Called by logging."""
        if record.name != RECORDS_LOG:  # what the file itself has to say, of a full disk, is logged under its lock
            text, about = record.getMessage()[:KEPT_CHARS], {"role": self.role, "pid": os.getpid(), "level": record.levelname}
            self._rows.add({"time": round(record.created, 3), **about, "text": text})


class Throttle(logging.Filter):
    """Lets some lines of one kind through at once and some a second after that; the next line says how many were held back.

    Lines are of one kind when they come from one statement of one logger: its text before the values are put in. A peer that sends nonsense
    by the million hides no line of another kind.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.clock, self._kinds = clock, dict[tuple[str, int, str], _Bucket]()

    def filter(self, record: logging.LogRecord) -> bool:
        """True for a line that is written."""
        now = self.clock()
        burst, per_s = WARNINGS if record.levelno >= logging.WARNING else NEWS
        kind = (record.name, record.levelno, str(record.msg))
        if kind not in self._kinds and len(self._kinds) >= MAX_KINDS:
            self._kinds.clear()
        bucket = self._kinds.setdefault(kind, _Bucket(float(burst), now))
        bucket.left, bucket.at = min(float(burst), bucket.left + (now - bucket.at) * per_s), now
        if bucket.left < 1.0:
            bucket.held_back += 1
            return False
        bucket.left -= 1.0
        if bucket.held_back:
            record.msg, record.args = f"{record.getMessage()} ({bucket.held_back} more like it)", None
            bucket.held_back = 0
        return True


class _Bucket:
    __slots__ = ("at", "held_back", "left")

    def __init__(self, left: float, at: float) -> None:
        self.left, self.at, self.held_back = left, at, 0
