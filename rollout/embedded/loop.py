"""The decode thread: runs the core while there is work, sleeps on a condition while there is none."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from rollout.embedded.core import EngineCore
from rollout.embedded.sequence import Sequence

T = TypeVar("T")
Report = Callable[[list[Sequence]], None]


class DecodeLoop:
    """Owns the core's thread. `call` runs a function on it between two steps; `report` gets each step's sequences.

    `report` and `failed` are called on the decode thread; they must hand over quickly and not raise.
    """

    def __init__(self, core: EngineCore, report: Report, failed: Callable[[BaseException], object]) -> None:
        self._core, self._report, self._failed = core, report, failed
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """End the thread after its current step; False when it did not end in time."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def call(self, action: Callable[[EngineCore], T]) -> Future[T]:
        """Run `action(core)` on the decode thread between two steps; its result or exception is in the future.

        What a client asked for is done, whether it waits for the answer or not.
        """
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # from now on nobody can cancel it

        def run() -> None:
            try:
                future.set_result(action(self._core))
            except Exception as error:  # noqa: BLE001 (carried to the caller)
                future.set_exception(error)

        with self._wake:
            self._inbox.append(run)
            self._wake.notify()
        return future

    def _run(self) -> None:
        try:
            while self._next_actions():
                if self._core.has_work and (reported := self._core.step()):
                    self._report(reported)
        except BaseException as error:  # noqa: BLE001 (the thread's boundary: the process must learn that it ended)
            self._failed(error)

    def _next_actions(self) -> bool:
        """Run what came in; waits while there is neither that nor work. False when the loop must end."""
        with self._wake:
            while not (self._inbox or self._is_stopping or self._core.has_work):
                self._wake.wait()
            actions = list(self._inbox)
            self._inbox.clear()
        for action in actions:
            action()
        return not self._is_stopping
