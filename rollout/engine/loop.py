"""The decode thread: runs the core while there is work, sleeps on a condition while there is none."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from rollout.engine.core import EngineCore
from rollout.engine.sequence import Sequence

T = TypeVar("T")
Tell = Callable[[list[Sequence]], None]

THROUGHPUT_WINDOW_S = 1.0


class DecodeLoop:
    """Owns the core's thread. `call` runs a function on it between two steps; `tell` gets each step's sequences.

    `tell` and `failed` are called on the decode thread; they must hand over quickly and not raise.
    """

    def __init__(self, core: EngineCore, tell: Tell, failed: Callable[[BaseException], None]) -> None:
        self._core, self._tell, self._failed = core, tell, failed
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
        self._window_start_s, self._window_tokens = time.monotonic(), 0
        self._throughput = 0.0

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
        """Run `action(core)` on the decode thread between two steps; its result or exception is in the future."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(action(self._core))
            except Exception as error:  # noqa: BLE001 (carried to the caller, who waits for it)
                future.set_exception(error)

        with self._wake:
            self._inbox.append(run)
            self._wake.notify()
        return future

    def load(self) -> dict[str, Any]:
        """Counts of now, for /server_info: approximate, read without stopping the thread."""
        is_idle = time.monotonic() - self._window_start_s > 3 * THROUGHPUT_WINDOW_S
        scheduler = self._core.scheduler
        return {
            "num_running_reqs": len(scheduler.running),
            "num_waiting_reqs": len(scheduler.waiting),
            "last_gen_throughput": 0.0 if is_idle else round(self._throughput, 1),
            "num_generated_tokens": self._core.num_generated,
            "is_paused": self._core.is_paused,
        }

    def _run(self) -> None:
        try:
            while self._next_actions():
                if self._core.has_work:
                    told = self._core.step()
                    self._measure()
                    if told:
                        self._tell(told)
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

    def _measure(self) -> None:
        now = time.monotonic()
        elapsed_s = now - self._window_start_s
        if elapsed_s >= THROUGHPUT_WINDOW_S:
            self._throughput = (self._core.num_generated - self._window_tokens) / elapsed_s
            self._window_start_s, self._window_tokens = now, self._core.num_generated
