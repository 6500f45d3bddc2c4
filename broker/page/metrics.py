"""What a run measures, for Prometheus: the broker's own, what trainer and workers report to it, evaluations (docs/metrics.md)."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from broker.page.history import History
from slimebus.cli.metrics import grouped

CONTENT_TYPE = str(CONTENT_TYPE_LATEST)
HELP = "docs/metrics.md"
BY_LAG = re.compile(r"(train|mismatch)/lag/([^/]+)/(.+)")


class Families:
    """Families of metrics in the order in which they are first given a value."""

    def __init__(self) -> None:
        self.of: dict[str, Any] = {}

    def gauge(self, name: str, value: object, **labels: str) -> None:
        """One value; nothing for one that is no finite number."""
        self._add(GaugeMetricFamily, name, value, labels)

    def counter(self, name: str, value: object, **labels: str) -> None:
        """One value that only rises while the run goes on; its name ends in `_total`."""
        self._add(CounterMetricFamily, name, value, labels)

    def _add(self, kind: Any, name: str, value: object, labels: Mapping[str, str]) -> None:
        if isinstance(value, int | float) and math.isfinite(value):
            name = "slimebus_" + re.sub(r"\W", "_", name)
            family = self.of.setdefault(name, kind(name, HELP, labels=list(labels)))
            family.add_metric(list(labels.values()), float(value))

    def collect(self) -> Iterator[Metric]:
        """For prometheus_client."""
        yield from self.of.values()


def exposition(status: dict[str, Any], history: History) -> bytes:
    """The text that Prometheus reads. status: the broker's as it is now; without it only `slimebus_broker_up 0` and what is on record."""
    found = Families()
    found.gauge("broker_up", float(bool(status)))
    if status:
        _broker(found, status)
    for client in status.get("clients", []):
        if client["role"] == "rollout" and client["state"] not in ("gone", "fenced"):
            found.gauge("rollout_version", client["version"], worker=client["name"])
            for name, value in client["metrics"].items():
                found.gauge(grouped("rollout", name), value, worker=client["name"])
    for name, value in history.last.get("metrics", {}).items():
        by_lag = BY_LAG.fullmatch(full := grouped("trainer", name))
        found.gauge(f"train/lag_{by_lag[3]}", value, lag=by_lag[2]) if by_lag else found.gauge(full, value)
    for dataset, row in {dataset: row for (dataset, _), row in list(history.evaluations.items())}.items():
        for name in ("mean_reward", "low", "high", "version", "num_samples", "num_failed"):
            found.gauge(f"eval/{name}", row.get(name), dataset=dataset)
    return bytes(generate_latest(cast(Any, found)))


def _broker(found: Families, status: dict[str, Any]) -> None:
    for name in ("step", "num_steps", "version"):
        found.gauge(f"broker/{name}", status[name])
    found.gauge("broker/stalled_seconds", (status["stalled"] or {}).get("since_s", 0.0))
    for phase, count in status["groups"].items():
        found.gauge("broker/groups", count, phase=phase)
    for move, count in status["moves"].items():
        found.counter("broker/moves", count, move=move)
    for what, count in status["counted"].items():
        found.counter("broker/counted", count, what=what)
    for reason, waste in status["waste"].items():
        found.counter("broker/wasted_groups", waste["groups"], reason=reason)
        found.counter("broker/wasted_tokens", waste["tokens"], reason=reason)
    for lag, count in status["lag"]["histogram"].items():
        found.counter("broker/trained_groups", count, lag=lag)
    for name, bound in status["bounds"].items():
        found.counter("broker/bound_hits", bound["hits"], bound=name)
    for name, value in status["pace"].items():
        found.gauge(f"broker/{name}", value)
    states: dict[tuple[str, str], int] = {}
    for client in status["clients"]:
        key = (client["role"], client["state"].partition(":")[0])
        states[key] = states.get(key, 0) + 1
    for (role, state), count in states.items():
        found.gauge("broker/clients", count, role=role, state="lost" if state == "gone" else state)
