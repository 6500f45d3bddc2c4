"""What a process measures, for Prometheus: the names and labels of docs/metrics.md, and a `/metrics` of its own."""

import contextlib
import hmac
import logging
import math
import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from http.server import ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import MetricsHandler

from slimebus.bus.errors import UsageError
from slimebus.config import Resolved
from slimebus.security.exposure import check_bind
from slimebus.security.http_address import listen, read_address, token_of, write_address
from slimebus.telemetry.metrics import grouped

log = logging.getLogger("slimebus")

NUM_PORTS = 64
"""Tried after that of the page: the processes of one machine may share one config."""
BY_LAG = re.compile(r"lag/([^/]+)/(.+)")
Values = Iterator[tuple[str, dict[str, str], object]]
"""Name with its group, labels, value."""


def families(values: Iterable[tuple[str, dict[str, str], object]]) -> list[Metric]:
    """Gauges as Prometheus names them; what is no finite number, or cannot be written as UTF-8, is left out."""
    found: dict[str, Metric] = {}
    for name, labels, value in values:
        with contextlib.suppress(OverflowError, UnicodeError):  # beyond any float; a name or label that is no UTF-8
            "".join(map(str, (name, *labels.values()))).encode()
            if isinstance(value, int | float) and math.isfinite(value):
                name = "slimebus_" + re.sub(r"\W", "_", name)
                found.setdefault(name, Metric(name, "docs/metrics.md", "gauge")).add_sample(name, labels, float(value))
    return list(found.values())


def of_process(role: str, process: str, metrics: Mapping[str, object]) -> Values:
    """The metrics that a process reports, by the names of all roles."""
    for metric, value in metrics.items():
        by_lag = BY_LAG.fullmatch(metric)
        name = f"train/lag_{by_lag[2]}" if by_lag else grouped(role, metric)
        yield name, {"process": process} | ({"lag": by_lag[1]} if by_lag else {}), value


class MetricsServer:
    """`/metrics` of one process beside the page, at broker.http, until `close`: what `read` gives when it is asked, and its memory and CPU
    time.

    Its address is logged and kept in RUN_DIR/metrics/PROCESS.url. Where it cannot be bound there is a warning and no server: metrics are
    not worth a run. Raises UsageError when it may not be bound.
    """

    def __init__(self, resolved: Resolved, role: str, process: str, read: Callable[[], Mapping[str, float]]) -> None:
        self.role, self.process, self.read = role, process, read
        address, file = resolved.config.broker.http, resolved.run_dir / "metrics" / f"{process}.url"
        self._server: ThreadingHTTPServer | None = None
        self.url = ""
        if not address:
            return
        has_keys, insecure = resolved.keys_path is not None, resolved.config.security.insecure
        check_bind(f"tcp://{address}", "broker.http", has_keys=has_keys, insecure=insecure)
        try:
            self._serve(address, file)
        except (UsageError, OSError, ValueError) as bad:
            log.warning("metrics are not served at %s: %s (broker.http: an address of this machine, or '' for none)", address, bad)

    def _serve(self, address: str, file: Path) -> None:
        sock, self.url = listen(address, read_address(file), path="metrics", num_ports=NUM_PORTS)
        with contextlib.suppress(OSError):  # a full disk: it is in the log
            write_address(file, self.url)
        registry = CollectorRegistry()
        registry.register(self)
        ProcessCollector(registry=registry)
        handler = type("Handler", (_Handler,), {"registry": registry, "token": token_of(self.url)})
        self._server = ThreadingHTTPServer(sock.getsockname()[:2], handler, bind_and_activate=False)
        self._server.socket.close()
        self._server.socket = sock
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()
        log.info("metrics: %s", self.url)

    def collect(self) -> list[Metric]:
        """What a registry asks."""
        return families(of_process(self.role, self.process, self.read()))

    def close(self) -> None:
        """Release the address."""
        if self._server is not None:
            with contextlib.suppress(OSError):
                self._server.socket.shutdown(socket.SHUT_RDWR)  # wakes it, where the system can
            self._server.shutdown()
            self._server.server_close()
            self._server = None


class _Handler(MetricsHandler):
    """GET /metrics, of whoever has the token. timeout: seconds for which a request may be incomplete."""

    token, timeout = "", 10.0

    def do_GET(self) -> None:
        given = token_of(self.path) or self.headers.get("Authorization", "").removeprefix("Bearer ")
        if urlsplit(self.path).path != "/metrics":
            self.send_error(404)
        elif not hmac.compare_digest(given.encode(errors="surrogatepass"), self.token.encode()):
            self.send_error(403, "the token is missing: the address in RUN_DIR/metrics/PROCESS.url has it")
        else:
            super().do_GET()
