"""A request that waits for its answer, the answer, and how long a server has given none."""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from slimebus.bus.errors import SlimebusError
from slimebus.bus.messages import Message, wire_name

M = TypeVar("M", bound=Message)


class ReceivedReply(NamedTuple):
    """A decoded reply and its bulk frames."""

    message: Message
    bulk: Sequence[Any]

    def expect(self, kind: type[M]) -> M:
        """The message, which must be of this kind. Raises SlimebusError `protocol` for another."""
        if not isinstance(self.message, kind):
            text = f"the answer is of type {wire_name(type(self.message))!r}, expected {wire_name(kind)!r}"
            raise SlimebusError(f"{text}; run the same slimebus release everywhere", code="protocol")
        return self.message


class Pending:
    """A request without its answer. sent_on: number of the connection that it was sent through, 0 before it is sent or sent again."""

    def __init__(self, message: Message, bulk: Sequence[Any], timeout_s: float, resend_s: float) -> None:
        now = time.monotonic()
        self.message, self.bulk, self.timeout_s, self.resend_s = message, bulk, timeout_s, resend_s
        self.deadline, self.resend_at = now + timeout_s, now
        self.size_bytes, self.sent_on = sum(map(len, bulk)), 0
        self.future: Future[ReceivedReply] = Future()

    def resolve(self, result: ReceivedReply | SlimebusError) -> None:
        """Give the waiting caller the answer, or the error."""
        if not self.future.set_running_or_notify_cancel():
            return
        if isinstance(result, SlimebusError):
            self.future.set_exception(result)
        else:
            self.future.set_result(result)

    def retry_in(self, pause_s: float) -> None:
        """Send it again after a pause."""
        self.resend_at, self.sent_on = time.monotonic() + pause_s, 0


log = logging.getLogger("slimebus.transport")

SILENT_S = 5.0
"""A heartbeat without an answer for so long is logged, and again each time the silence has doubled, at least every LONGEST_SILENCE_S."""
LONGEST_SILENCE_S = 600.0


class Silence:
    """From the first heartbeat without an answer to the next answer. server: its name and address. Used by one thread."""

    def __init__(self, server: str) -> None:
        self.server = server
        self._since, self._logged_s = float("inf"), 0.0

    @property
    def seconds(self) -> float:
        """For which a heartbeat has waited for an answer, 0 when none does."""
        return max(0.0, time.monotonic() - self._since)

    def begin(self) -> None:
        """A heartbeat is sent."""
        self._since = min(self._since, time.monotonic())

    def end(self) -> None:
        """An answer came."""
        if self._logged_s:
            log.warning("the %s answers again, after %.0f s", self.server, self.seconds)
        self._since, self._logged_s = float("inf"), 0.0

    def log(self, why: str) -> None:
        """Log a silence that is long enough for the next line."""
        logged_s = self._logged_s or SILENT_S / 2
        if self.seconds >= logged_s + min(logged_s, LONGEST_SILENCE_S):
            self._logged_s = self.seconds
            log.warning("the %s has not answered for %.0f s; %s", self.server, self.seconds, why)
