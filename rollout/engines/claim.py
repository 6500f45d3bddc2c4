"""One worker for an engine: two would move it from version to version at once, each loading what it lacks by its own account.

Who attaches by URL binds a name among this host's abstract sockets, which ends with its process, killed or not. Workers of other hosts
are not seen.
"""

import asyncio
import contextlib
import errno
import socket
import sys
import time
from urllib.parse import urlsplit

from slimebus.bus.errors import UsageError

WAIT_S, POLL_S = 15.0, 0.2
"""A worker that is just leaving, with what it is sampling, is waited for."""


async def claim(url: str) -> socket.socket:
    """The claim, as long as it is open. Raises UsageError for no URL, and when another worker of this host keeps the engine for WAIT_S."""
    name = f"\0slimebus-engine-{await _place(url)}"
    held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    if sys.platform != "linux":  # others have no abstract sockets, and nothing that ends as surely with its process
        return held
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            held.bind(name)
            return held
        except OSError as bad:
            if bad.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                held.close()
                raise UsageError(f"the engine at {url} is another worker's of this host; give each worker engines of its own") from None
        await asyncio.sleep(POLL_S)


async def _place(url: str) -> str:
    """The same for each way to write the address. Raises UsageError when it is none."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        with contextlib.suppress(OSError):
            host = str((await asyncio.get_running_loop().getaddrinfo(host, port, family=socket.AF_INET))[0][4][0])
    except ValueError as bad:  # of a port, a bracket, or a part of a name that is too long
        raise UsageError(f"{url!r} is no engine's address ({bad}); expected http://HOST:PORT") from None
    return f"{host}:{port}"
