"""Waiting for what other threads and processes bring about."""

import time
from collections.abc import Callable
from typing import TypeVar

import psutil

Found = TypeVar("Found")


def wait_until(what: str, is_true: Callable[[], Found], timeout_s: float = 30.0, *, every_s: float = 0.01) -> Found:
    """The first true answer of is_true; fails by name after timeout_s seconds."""
    deadline = time.monotonic() + timeout_s
    while not (found := is_true()):
        assert time.monotonic() < deadline, f"no {what} within {timeout_s:.0f} s"
        time.sleep(every_s)
    return found


def has_ended(pid: int) -> bool:
    """True for a process that is gone, or that its parent has yet to take leave of."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
