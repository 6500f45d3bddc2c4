"""The decode thread: runs the core while there is work, sleeps while there is none."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from rollout.embedded.core import EngineCore
from rollout.embedded.sequence import Sequence

T = TypeVar("T")
Report = Callable[[list[Sequence]], None]


class DecodeLoop:
    """Owns the core's thread. `call` runs a function on it between two steps; `report` gets what each step ended.

    `report` and `failed` are called on the decode thread; they must hand over quickly and not raise.
    """

    def __init__(self, core: EngineCore, report: Report, failed: Callable[[BaseException], None]) -> None:
        self._core, self._report, self._failed = core, report, failed
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """End the thread after its current step; False when it did not end in time."""
        self._is_stopping = True
        self._inbox.put(lambda: None)  # wakes it
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

        self._inbox.put(run)
        return future

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._run_actions()
                if self._core.has_work and (ended := self._core.step()):
                    self._report(ended)
        except BaseException as error:  # noqa: BLE001 (the thread's boundary: the process must learn that it ended)
            self._failed(error)

    def _run_actions(self) -> None:
        """Those that came in; waits for one while there is nothing to decode."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._inbox.get(block=not (self._core.has_work or self._is_stopping))()
