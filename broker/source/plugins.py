"""Plug-ins that run in the broker: called with their failures as HookError, and named when they are slow."""

import logging
import time
from collections.abc import Callable
from typing import Any

from slimebus.bus.errors import HookError
from slimebus.process.hooks import text_of

log = logging.getLogger("broker")

SLOW_S = 0.1
"""The broker answers nobody while a plug-in works, and leases expire when that takes long; longer than this is logged."""


def call_plugin(name: str, plugin: Callable[..., Any], *given: Any) -> Any:
    """What the plug-in returns. Raises HookError with its name for anything it raises, SystemExit too."""
    started = time.monotonic()
    try:
        answer = plugin(*given)
    except BaseException as bad:  # signals set a flag in the broker: none of these is a Ctrl-C
        raise HookError(f"{name} failed: {type(bad).__name__}: {text_of(bad)}") from bad
    if (took := time.monotonic() - started) > SLOW_S:
        log.warning("%s took %.2f s; the broker answers nobody meanwhile", name, took)
    return answer
