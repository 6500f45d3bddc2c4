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
from slimebus.bus.transport.client import Client
from slimebus.cli.commands.status import ask_status, last_status
from slimebus.cli.config import Resolved
from slimebus.client.connect import visit

ANSWER_S, EDIT_S = 5.0, 30.0
RATE_OVER_S = 3.0
SHOWN = (
    *("run", "state", "step", "num_steps", "version", "groups", "moves", "lag", "waste", "counted", "waiting", "stalled", "pace", "source"),
    *("bounds", "changes", "refused", "store", "security", "settings"),
)
"""Of the status; the rest is in the records."""
WORKER = ("name", "role", "state", "version", "lag", "tokens_per_s", "leases", "silent_s", "sync_s", "tokens")


class Live:
    """The newest status. One thread asks. broker: its address; None: of the one that has the run's store open."""

    def __init__(self, resolved: Resolved, broker: str | None) -> None:
        self.resolved, self.broker = resolved, broker
        self.status: dict[str, Any] = {}
        self.problem = ""
        """Why the status is not of now."""
        self.took_s = 0.0
        """How long the broker took to answer."""
        self.asked_at = 0.0
        self._opened, self._address = contextlib.ExitStack(), ""
        self._client: Client | None = None
        self._tokens: dict[str, tuple[float, float, float]] = {}

    def look(self) -> None:
        """Ask; without a broker that answers the status stays, and `problem` says why."""
        self.asked_at = started = time.monotonic()
        try:
            self.status, self.problem = ask_status(self._connected(), ANSWER_S), ""
        except SlimebusError as bad:
            self.problem = bad.text
            self.close()
            self.status = self.status or last_status(self.resolved.run_dir) or {}
            if self.status.get("state") == "finished":
                self.problem = "the run is over"
        self.took_s = time.monotonic() - started

    def _connected(self) -> Client:
        address = self._endpoint()
        if self._client is None or address != self._address:
            self.close()
            self._address = address
            self._client = self._opened.enter_context(visit(self.resolved, address, what="page", role="viewer"))
        return self._client

    def _endpoint(self) -> str:
        """Raises UsageError when no broker runs."""
        found = self.broker or live_endpoint(self.resolved.run_dir / "broker")
        if found is None:
            raise UsageError("no broker of this run is running; this is what it last said")
        return reachable(found)

    def replay(self, groups: Sequence[str]) -> EditReply:
        """Have dead or dropped groups tried again. Raises SlimebusError, as where no key of a client is at hand."""
        with visit(self.resolved, self._endpoint(), what="page") as client:
            return BufferEditor(client, EDIT_S).edit_all("replay", groups, "asked for on the page")

    def close(self) -> None:
        """Leave the broker."""
        self._opened.close()
        self._client = None

    def shown(self) -> dict[str, Any]:
        """The status as the page takes it: without the records, and one short row for each process."""
        newest = self.status.get("version", -1)
        rows = [self._row(client, newest) for client in self.status.get("clients", [])]
        running = [e for e in self.status.get("evaluations", []) if not e["done"]]
        found = {name: self.status[name] for name in SHOWN if name in self.status}
        return found | {"problem": self.problem, "worker_columns": WORKER, "workers": rows, "evaluating": running}

    def _row(self, client: dict[str, Any], newest: int) -> list[Any]:
        metrics, state = client["metrics"], "lost" if client["state"] == "gone" else client["state"]
        is_serving = client["role"] == "rollout" and client["version"] >= 0
        values = {
            **{name: client[name] for name in ("name", "role", "version", "leases", "silent_s")},
            "state": state,
            "lag": newest - client["version"] if is_serving else None,
            "tokens_per_s": self._rate(client["name"], metrics.get("tokens", 0.0)) if state != "lost" else 0.0,
            "sync_s": metrics.get("sync_s"),
            "tokens": metrics.get("tokens"),
        }
        return [round(v, 3) if isinstance(v, float) else v for v in (values[name] for name in WORKER)]

    def _rate(self, name: str, tokens: float) -> float:
        """Tokens a second of a worker, over RATE_OVER_S or more."""
        since, had, rate = self._tokens.get(name, (self.asked_at, tokens, 0.0))
        if self.asked_at - since >= RATE_OVER_S:
            rate, since, had = max(0.0, tokens - had) / (self.asked_at - since), self.asked_at, tokens
        self._tokens[name] = (since, had, rate)
        return rate
