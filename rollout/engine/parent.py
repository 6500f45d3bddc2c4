"""End this process when its parent's ends, without polling."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable


def watch_parent(loop: asyncio.AbstractEventLoop, parent_pid: int, on_exit: Callable[[], None]) -> None:
    """Call `on_exit` once when process `parent_pid` has ended, or now if it is not our parent any more.

    A pidfd becomes readable when its process ends. PR_SET_PDEATHSIG is not used: it fires when the *thread* that
    started us ends, and a worker may start its engine from a short-lived thread.
    """
    try:
        descriptor = os.pidfd_open(parent_pid)
    except ProcessLookupError:
        on_exit()
        return
    if os.getppid() != parent_pid:
        os.close(descriptor)
        on_exit()
        return

    def ended() -> None:
        loop.remove_reader(descriptor)
        os.close(descriptor)
        on_exit()

    loop.add_reader(descriptor, ended)
