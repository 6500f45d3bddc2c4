"""The socket an engine listens on, taken before the slow part of its start."""

from __future__ import annotations

import socket

from slimebus.errors import UsageError


def bind(host: str, port: int) -> socket.socket:
    """A bound socket, not yet listening; UsageError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from None
    return sock
