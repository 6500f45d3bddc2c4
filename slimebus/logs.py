"""Logs of a process: one line an event on stderr, `time role level: text`."""

import logging
import sys


def set_up(role: str, *, debug: bool = False) -> None:
    """Send logs of this process to stderr; third parties only from WARNING up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {role} %(levelname)s: %(message)s", datefmt="%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in ("slimebus", "broker", "rollout", "trainer"):
        logging.getLogger(name).setLevel(logging.DEBUG if debug else logging.INFO)
