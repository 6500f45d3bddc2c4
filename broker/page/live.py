"""What the broker of a run says now, asked as any other client asks; the last it said, where none answers."""

import time
from collections.abc import Sequence
from typing import Any

from broker.inspect.changes import BufferEditor
from slimebus.bus.messages import EditReply
from slimebus.client.connect import visit
from slimebus.config import Resolved
from slimebus.view.run_status import RunStatus

ANSWER_S, EDIT_S = 5.0, 30.0
LEFT_OUT = ("clients", "steps", "parked", "evaluations", "skipped_prompts")
"""Of the status: in the records, or shown otherwise."""
OF_CLIENT, OF_METRICS = ("name", "role", "state", "version", "leases", "silent_s"), ("sync_s", "tokens")


class Live(RunStatus):
    """The newest status, for one thread that asks. took_s: how long the broker took to answer."""

    def __init__(self, resolved: Resolved, broker: str | None) -> None:
        super().__init__(resolved, broker, what="page", timeout_s=ANSWER_S)
        self.took_s = 0.0

    def poll(self, patience_s: float = 0.0) -> None:
        """Ask; without a broker that answers the status stays."""
        started = time.monotonic()
        super().poll(patience_s)
        self.took_s = time.monotonic() - started

    def replay(self, groups: Sequence[str]) -> EditReply:
        """Have dead or dropped groups tried again. Raises SlimebusError, as where no key of a client is at hand."""
        with visit(self.resolved, self.broker, what="page", patience_s=0.0) as client:
            return BufferEditor(client, EDIT_S).edit_all("replay", groups, "asked for on the page")

    def summary(self) -> dict[str, Any]:
        """The status as the page takes it: without the records, and one short row for each process."""
        clients = self.status.get("clients", [])
        rows = [[*(c[name] for name in OF_CLIENT), *(c["metrics"].get(name) for name in OF_METRICS)] for c in clients]
        found = {name: value for name, value in self.status.items() if name not in LEFT_OUT}
        return found | {"problem": self._reason(), "worker_columns": OF_CLIENT + OF_METRICS, "workers": rows}

    def _reason(self) -> str:
        """Why the status is not of now; empty when it is."""
        return "" if self.problem is None else "the run is over" if self.is_over else self.problem.text
