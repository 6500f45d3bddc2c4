"""What a run measures, for Prometheus: the broker's own, what trainer and workers report to it, evaluations (docs/metrics.md)."""

from types import SimpleNamespace
from typing import Any, cast

from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from broker.page.history import History
from slimebus.telemetry.exporter import Values, families, of_process

CONTENT_TYPE = str(CONTENT_TYPE_LATEST)
BY_NAME = {"groups": "phase", "moves": "move", "counted": "what", "waste": "reason", "bounds": "bound", "histogram": "lag"}
"""Section of the status whose names are a label, and that label."""


def exposition(status: dict[str, Any], history: History) -> bytes:
    """The text that Prometheus reads. status: the broker's as it is now; without it only `slimebus_broker_up 0` and what is on record."""
    found = families(values(status, history))
    return bytes(generate_latest(cast(Any, SimpleNamespace(collect=lambda: found))))


def values(status: dict[str, Any], history: History) -> Values:
    """Name with its group, labels, value."""
    yield "broker/up", {}, int(bool(status))
    yield "broker/stalled_seconds", {}, (status.get("stalled") or {}).get("since_s", 0.0)
    sections = {**status, **status.get("pace", {}), "histogram": status.get("lag", {}).get("histogram", {})}
    for section, found in sections.items():
        if section not in BY_NAME:
            yield f"broker/{section}", {}, found
        for key, value in found.items() if section in BY_NAME else ():
            name = "broker/trained_groups" if section == "histogram" else f"broker/{section}"
            for part, one in value.items() if isinstance(value, dict) else [("", value)]:
                yield f"{name}_{part}".rstrip("_"), {BY_NAME[section]: key}, one
    trained = history.last.get("metrics", {})
    for client in status.get("clients", []):
        yield "broker/silent_seconds", {"role": client["role"], "process": client["name"]}, client["silent_s"]
        yield "broker/process_version", {"role": client["role"], "process": client["name"]}, client["version"]
        if client["role"] != "trainer" or not trained:  # of a trainer's it keeps the first 64
            yield from of_process(client["role"], client["name"], client["metrics"])
    yield from of_process("trainer", "trainer", trained)
    for (dataset, version), row in list(history.evaluations.items()):
        if version == max(v for name, v in list(history.evaluations) if name == dataset):
            for metric in ("mean_reward", "low", "high", "version", "num_samples", "num_failed"):
                yield f"eval/{metric}", {"dataset": dataset}, row.get(metric)
