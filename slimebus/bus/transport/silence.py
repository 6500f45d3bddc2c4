"""How long a server has not answered, and the log lines about it."""

import logging
import time

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
