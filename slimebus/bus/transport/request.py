"""A request that waits for its answer, and the answer."""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from slimebus.bus.errors import SlimebusError
from slimebus.bus.messages import Message, wire_name

M = TypeVar("M", bound=Message)


class Reply(NamedTuple):
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
        self.future: Future[Reply] = Future()

    def settle(self, result: Reply | SlimebusError) -> None:
        """Give whoever waits the answer, or the error."""
        if not self.future.set_running_or_notify_cancel():
            return
        if isinstance(result, SlimebusError):
            self.future.set_exception(result)
        else:
            self.future.set_result(result)

    def retry_in(self, pause_s: float) -> None:
        """Send it again after a pause."""
        self.resend_at, self.sent_on = time.monotonic() + pause_s, 0
