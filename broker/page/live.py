"""What the broker of a run says now, asked as any other client asks; the last it said, where none answers."""

import contextlib
import time
from collections.abc import Sequence
from typing import Any

from broker.buffer.changes import BufferEditor
from broker.buffer.reader import live_endpoint
from slimebus.bus.errors import SlimebusError, UsageError
from slimebus.bus.messages import EditReply
from slimebus.bus.security.exposure import reachable
from slimebus.cli.commands.status import ask_status, last_status
from slimebus.cli.config import Resolved
from slimebus.client.connect import visit

ANSWER_S, EDIT_S = 5.0, 30.0
LEFT_OUT = ("clients", "steps", "parked", "evaluations", "skipped_prompts")
"""Of the status: in the records, or shown otherwise."""
OF_CLIENT, OF_METRICS = ("name", "role", "state", "version", "leases", "silent_s"), ("sync_s", "tokens")


class Live:
    """The newest status. One thread asks. broker: its address; None: of the one that has the run's store open.

    problem: why the status is not of now. took_s: how long the broker took to answer.
    """

    def __init__(self, resolved: Resolved, broker: str | None) -> None:
        self.resolved, self.broker = resolved, broker
        self.status: dict[str, Any] = {}
        self.problem, self.took_s = "", 0.0
        self._opened, self._address = contextlib.ExitStack(), ""
        self._client: Any = None

    def look(self) -> None:
        """Ask; without a broker that answers the status stays, and `problem` says why."""
        started = time.monotonic()
        try:
            if self._address != (address := self._endpoint()):
                self._opened.close()
                self._client = self._opened.enter_context(visit(self.resolved, address, what="page", role="viewer"))
                self._address = address
            self.status, self.problem = ask_status(self._client, ANSWER_S), ""
        except SlimebusError as bad:
            self._address = ""
            self.status = self.status or last_status(self.resolved.run_dir) or {}
            self.problem = "the run is over" if self.status.get("state") == "finished" else bad.text
        self.took_s = time.monotonic() - started

    def _endpoint(self) -> str:
        found = self.broker or live_endpoint(self.resolved.run_dir / "broker")
        if found is None:
            raise UsageError("no broker of this run is running; this is what it last said")
        return reachable(found)

    def replay(self, groups: Sequence[str]) -> EditReply:
        """Have dead or dropped groups tried again. Raises SlimebusError, as where no key of a client is at hand."""
        with visit(self.resolved, self._endpoint(), what="page") as client:
            return BufferEditor(client, EDIT_S).edit_all("replay", groups, "asked for on the page")

    def shown(self) -> dict[str, Any]:
        """The status as the page takes it: without the records, and one short row for each process."""
        clients = self.status.get("clients", [])
        rows = [[*(c[name] for name in OF_CLIENT), *(c["metrics"].get(name) for name in OF_METRICS)] for c in clients]
        found = {name: value for name, value in self.status.items() if name not in LEFT_OUT}
        return found | {"problem": self.problem, "worker_columns": OF_CLIENT + OF_METRICS, "workers": rows}
