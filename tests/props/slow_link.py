"""A TCP relay that stands for a network: of a given rate, cut at a given byte, counted."""

import contextlib
import socket
import threading
import time
from urllib.parse import urlsplit


class SlowLink:
    """Carries bytes between whoever connects to `endpoint` and the server at `target`.

    rate: bytes a second towards the puller, None for as fast as it goes; may be changed at any time. carried: bytes that way so far.
    """

    def __init__(self, target: str, rate: float | None = None, host: str = "127.0.0.1", port: int = 0) -> None:
        self.target, self.rate, self.carried, self.num_connections = target, rate, 0, 0
        self._listener = socket.create_server((host, port))
        self.endpoint = f"tcp://{host}:{self._listener.getsockname()[1]}"
        self._open: set[socket.socket] = set()
        self._is_closed = False
        self._debt = threading.Lock()
        self._free_at = time.monotonic()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Break every connection, as a network does; new ones are taken."""
        for side in list(self._open):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Break every connection and take no more."""
        self._is_closed = True
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        address = urlsplit(self.target)
        while not self._is_closed:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            try:
                far = socket.create_connection((address.hostname, address.port), timeout=5)
            except OSError:  # the server is away
                near.close()
                continue
            for side in (near, far):
                side.settimeout(None)
                side.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
            self._open |= {near, far}
            threading.Thread(target=self._carry, args=(near, far, False), daemon=True).start()
            threading.Thread(target=self._carry, args=(far, near, True), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, is_down: bool) -> None:
        with contextlib.suppress(OSError):
            while found := source.recv(1 if is_down and self.rate is not None and self.rate < 100 else 1 << 14):
                if is_down:
                    self._wait_turn(len(found))
                    self.carried += len(found)
                sink.sendall(found)
        for side in (source, sink):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)
            side.close()
            self._open.discard(side)

    def _wait_turn(self, size: int) -> None:
        """A bucket without depth: the bytes of all connections leave one after the other at the rate."""
        if self.rate is None:
            return
        with self._debt:
            self._free_at = max(self._free_at, time.monotonic()) + size / self.rate
            until = self._free_at
        time.sleep(max(0.0, until - time.monotonic()))
