"""SIGTERM and Ctrl-C: the first one lets the loop save a checkpoint between two steps and leave, within a deadline."""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from slimebus.bus.errors import SlimebusError
from trainer.launch.plan import LAUNCHED

log = logging.getLogger("trainer")

BROADCAST_INTERVAL_S = 60.0
"""How often the ranks that wait for rank 0 hear that it still waits for a batch; far below the timeout of their collectives."""
RANK0_ERROR_GRACE_S = 5.0
"""How long a rank other than 0 that fails lets rank 0 say what is wrong: mostly it is the same, and the launcher then ends the others."""
FIRST_ERROR_S = 2.0
"""How long rank 0 waits with an error that may be the death of another rank: the launcher, which names that one, ends it meanwhile."""
WAKE_S = 0.5
"""How long after a signal the main thread is interrupted once more."""
POLL_S = 5
"""How often after the signal the deadline is looked at, and whether the broker, which may have been stopped too, still answers."""


class StopRequest:
    """Installed in the main thread of each rank. Outside of `deferred` a signal raises KeyboardInterrupt at once.

    More SIGTERMs do not disturb the leaving: the kernel may send one for each thread of a parent that is killed. A second Ctrl-C, the
    deadline, or a broker that is silent (`is_broker_silent`, on rank 0) raises KeyboardInterrupt. grace_s: from the signal to the deadline.
    """

    def __init__(self, grace_s: float = 25.0) -> None:
        self.grace_s, self.is_made = grace_s, False
        self.is_broker_silent: Callable[[], bool] = lambda: False
        self._is_deferred = False
        self._deadline = float("inf")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGURG, lambda *_: None)
        signals, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        threading.Thread(target=self._wake_main_thread, args=(signals,), name="stop-request", daemon=True).start()

    @staticmethod
    def _wake_main_thread(signals: int) -> None:
        """Python handles a signal that comes just before the main thread waits for another thread only once that wait ends: end it."""
        while numbers := os.read(signals, 64):
            if any(number != signal.SIGURG for number in numbers):
                time.sleep(WAKE_S)
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGURG)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside, a signal sets `is_made`; the code inside polls it often, and leaves when it is set."""
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False
            signal.alarm(0)

    @staticmethod
    @contextlib.contextmanager
    def one_rank_says_it() -> Iterator[None]:
        """An error leaves rank 0 first and the others after RANK0_ERROR_GRACE_S, so that one of all ranks is printed once, and no rank
        says only that another one is gone. The launcher gets its last line, for all nodes."""
        try:
            yield
        except Exception as bad:
            if LAUNCHED in os.environ:
                os.write(int(os.environ[LAUNCHED]), f"{type(bad).__name__}: {str(bad).strip().rpartition(chr(10))[2]}".encode())
            if os.environ.get("RANK", "0") != "0":
                time.sleep(RANK0_ERROR_GRACE_S)
            elif "RANK" in os.environ and not isinstance(bad, SlimebusError):
                time.sleep(FIRST_ERROR_S)
            raise

    def keep_deadline(self) -> None:
        """Let the deadline of a signal that came within `deferred` hold for what follows it, too."""
        if self.is_made:
            signal.alarm(POLL_S)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGALRM:
            if self.is_broker_silent() or now >= self._deadline:
                raise KeyboardInterrupt
        elif self.is_made and number == signal.SIGTERM:
            return
        elif self.is_made or not self._is_deferred:
            self.is_made = True
            raise KeyboardInterrupt
        else:
            self.is_made, self._deadline = True, now + self.grace_s
            log.info("%s: saving a checkpoint when this step is done, for %.0f s at most", signal.Signals(number).name, self.grace_s)
        signal.alarm(POLL_S)
