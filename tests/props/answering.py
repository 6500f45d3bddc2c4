"""A server on a thread, for tests of clients, keys and connections."""

import threading
from collections.abc import Callable
from typing import Any

from slimebus.messages import Heartbeat, HeartbeatReply, Hello, Message, Ok, Welcome
from slimebus.transport.server import Request, Server

Answer = Callable[[Request], Message | None]


def polite(request: Request) -> Message:
    """Welcome whoever says hello, and say ok to all else."""
    if isinstance(request.message, Hello):
        return Welcome(run="r1", epoch=7, heartbeat_s=0.05)
    return HeartbeatReply(version=3) if isinstance(request.message, Heartbeat) else Ok()


class Answering:
    """Answers each request with `answer(request)` and its own bulk; None leaves it unanswered. `todo` is done between two requests."""

    def __init__(self, answer: Answer = polite, bind: str = "tcp://127.0.0.1:0", **options: Any) -> None:
        self.server = Server(bind, run="r1", **options)
        self.seen: list[Request] = []
        self.todo: list[Callable[[], None]] = []
        self._answer, self._stop = answer, threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        while not self._stop.is_set():
            while self.todo:
                self.todo.pop()()
            for request in self.server.receive(0.02):
                self.seen.append(request)
                reply = self._answer(request)
                if reply is not None:
                    self.server.reply(request, reply, request.bulk)

    def close(self) -> None:
        if not self._stop.is_set():
            self._stop.set()
            self._thread.join()
            self.server.close()
