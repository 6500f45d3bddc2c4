"""The status of a run: asked of its broker, or read from the file that the broker wrote when it ended."""

import contextlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimebus.bus.errors import DataError, SlimebusError
from slimebus.bus.messages import Status, StatusReply
from slimebus.client.connect import broker_address, connect_without_joining, is_listening
from slimebus.config import Resolved
from slimebus.view.report import read_map

if TYPE_CHECKING:
    from slimebus.bus.transport.client import Client

FILE = "status.json"
OF_BROKER = {"run", "lineage", "state", "step", "version", "steps", "clients", "waste", "waiting"}


def ask_status(client: "Client", timeout_s: float) -> dict[str, Any]:
    """The broker's status as a map (docs/protocol.md). Raises SlimebusError."""
    reply = client.call(Status(), timeout_s=timeout_s)
    reply.expect(StatusReply)
    return dict(json.loads(bytes(reply.bulk[0])))


def last_status(run_dir: Path) -> dict[str, Any] | None:
    """What the broker of the run wrote when it ended; None when there is no such file, or another's."""
    found: dict[str, Any] = {}
    with contextlib.suppress(OSError, DataError):
        found = read_map(run_dir / FILE)
    return found if found.keys() >= OF_BROKER else None


class RunStatus:
    """The newest status of a run: its broker's, or, where none answers, the one that the broker wrote when it ended.

    broker: its address, where the user gave one. status: empty while nothing is known; made_at: when, in seconds since the epoch.
    problem: why the status is not of now; None when it is.
    """

    def __init__(self, resolved: Resolved, broker: str | None, *, what: str, timeout_s: float) -> None:
        self.resolved, self.broker, self.what, self.timeout_s = resolved, broker, what, timeout_s
        self.status: dict[str, Any] = {}
        self.made_at = time.time()
        self.problem: SlimebusError | None = None
        self._opened = contextlib.ExitStack()
        self._client: Client | None = None
        self._address = ""

    @property
    def is_over(self) -> bool:
        """Whether the run has finished."""
        return self.status.get("state") == "finished"

    def poll(self, patience_s: float = 0.0) -> None:
        """Ask the broker; one that was restarted may have another address. patience_s: how long to wait until one listens."""
        try:
            if self._client is None:
                self._address = ""
                self._address = broker_address(self.resolved, self.broker)
                asked = connect_without_joining(self.resolved, self._address, what=self.what, role="viewer", patience_s=patience_s)
                self._client = self._opened.enter_context(asked)
            self.status = ask_status(self._client, self.timeout_s)
            self.made_at, self.problem = time.time(), None
        except SlimebusError as bad:
            self.problem = bad
            self.close()
            if bad.code == "wrong_run" or not is_listening(self._address):  # one that listens and does not answer may be starting
                self._read_file()

    def close(self) -> None:
        """Leave the broker."""
        self._client = None
        self._opened.close()

    def _read_file(self) -> None:
        """Take the broker's file where it is newer than what is known, unless it may be of another run than the one at a given address."""
        found, expected = last_status(self.resolved.run_dir), self.resolved.expected_run
        if found is None or (self.broker and found["run"] != expected):
            return
        is_newer = (found["run"], found["lineage"]) == (self.status.get("run"), self.status.get("lineage"))
        if not self.status or (is_newer and found["step"] >= self.status["step"]):
            self.status, self.made_at = found, (self.resolved.run_dir / FILE).stat().st_mtime
