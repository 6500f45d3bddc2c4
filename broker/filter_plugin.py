"""The plug-in of `broker.buffer_filter_path`: loaded and checked when the broker starts, timed and fenced off when it is called."""

import inspect
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from broker.state.buffer_filter import BatchWanted, BufferFilter, ReadyGroup
from slimebus import hooks
from slimebus.errors import HookError

log = logging.getLogger("broker")

SLOW_S = 0.1
"""The broker answers nobody while the plug-in thinks; longer than this is said in the log."""


def load_buffer_filter(path: str, base: Path) -> BufferFilter | None:
    """The plug-in at `path`, None for an empty path. Raises HookError when it cannot be loaded or does not take (groups, batch)."""
    if not path:
        return None
    plugin = hooks.load(path, base=base)
    try:
        inspect.signature(plugin).bind([], None)
    except TypeError as bad:
        raise HookError(f"buffer filter {path}: must take (groups, batch): {bad}") from None
    return _fenced(path, plugin)


def _fenced(path: str, plugin: Callable[..., Any]) -> BufferFilter:
    def choose(groups: Sequence[ReadyGroup], batch: BatchWanted) -> Sequence[str]:
        started = time.monotonic()
        try:
            answer: Sequence[str] = plugin(groups, batch)
        except Exception as bad:  # a plug-in may fail in any way; the batch is chosen without it
            raise HookError(f"buffer filter {path}: {type(bad).__name__}: {bad}") from bad
        if (took := time.monotonic() - started) > SLOW_S:
            log.warning("buffer filter %s took %.2f s for %d groups; the broker answers nobody meanwhile", path, took, len(groups))
        return answer

    return choose
