"""What a run measures, for Prometheus: the broker's own, what every process reports to it, evaluations (docs/metrics.md).

Workers may be hundreds: of them there are the sum and quantiles, and each one's own values where they are asked for.
"""

import contextlib
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from broker.page.history import History
from slimebus.telemetry.metrics import grouped

CONTENT_TYPE = str(CONTENT_TYPE_LATEST)
BY_NAME = {
    **{"groups": "phase", "moves": "move", "counted": "what", "waste": "reason", "bounds": "bound", "histogram": "lag"},
    **{"refused": "reason", "problem": "of"},
}
"""Section of the status with names that become a label, and that label."""
BY_LAG = re.compile(r"lag/([^/]+)/(.+)")
QUANTILES = (0.0, 0.5, 0.9, 1.0)
LEFT = ("gone", "fenced")
Values = Iterator[tuple[str, dict[str, str], object]]
"""Name with its group, labels, value."""


def exposition(status: dict[str, Any], history: History, *, is_per_process: bool = False) -> bytes:
    """The text that Prometheus reads. status: the broker's as it is now; without it only `slimebus_broker_up 0` and what is on record.

    is_per_process: the values of each worker instead of their sum and quantiles.
    """
    found = families([*values(status, history), *process_values(status, history, is_per_process=is_per_process)])
    return bytes(generate_latest(cast(Any, SimpleNamespace(collect=lambda: found))))


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


def values(status: dict[str, Any], history: History) -> Values:
    """Of the broker and of the newest evaluations."""
    yield "broker/up", {}, int(bool(status))
    yield "broker/stalled_seconds", {}, (status.get("stalled") or {}).get("since_s", 0.0)
    sections = {**status, **status.get("pace", {}), "histogram": status.get("lag", {}).get("histogram", {})}
    sections |= {f"store_{name}": value for name, value in status.get("store", {}).items()}
    sections["problem"] = {name: int(bool(status[name].get("problem"))) for name in ("store", "security") if name in status}
    for section, found in sections.items():
        if section not in BY_NAME:
            yield f"broker/{section}", {}, found
        for key, value in found.items() if section in BY_NAME else ():
            name = "broker/trained_groups" if section == "histogram" else f"broker/{section}"
            for part, one in value.items() if isinstance(value, dict) else [("", value)]:
                yield f"{name}_{part}".rstrip("_"), {BY_NAME[section]: key}, one
    for (dataset, version), row in list(history.evaluations.items()):
        if version == max(v for name, v in list(history.evaluations) if name == dataset):
            for metric in ("mean_reward", "low", "high", "version", "num_samples", "num_failed"):
                yield f"eval/{metric}", {"dataset": dataset}, row.get(metric)


def process_values(status: dict[str, Any], history: History, *, is_per_process: bool) -> Values:
    """Of the trainer (its last step on record), of consumers by their names, and of workers; of none that has left."""
    trained = history.last.get("metrics", {})
    of_workers = defaultdict[tuple[str, tuple[tuple[str, str], ...]], list[float]](list)
    for client in status.get("clients", []):
        role, own = client["role"], {"silent_seconds": client["silent_s"], "process_version": client["version"]}
        rows = [(f"broker/{name}", {"role": role}, value) for name, value in own.items()]
        rows += [] if role == "trainer" and trained else list(_reported(role, client["metrics"]))  # of a trainer's the broker keeps 64
        for name, labels, value in rows if client["state"] not in LEFT else ():
            if role == "rollout" and not is_per_process:
                of_workers[name, tuple(labels.items())].append(value)
            else:
                yield name, labels | {"process": client["name"]}, value
    for (name, pairs), numbers in of_workers.items():
        yield f"{name}_sum", dict(pairs), math.fsum(numbers)
        for quantile, value in zip(QUANTILES, np.quantile(numbers, QUANTILES).tolist(), strict=True):
            yield name, {**dict(pairs), "quantile": f"{quantile:g}"}, value
    for name, labels, value in _reported("trainer", trained):
        yield name, labels | {"process": "trainer"}, value


def _reported(role: str, metrics: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, str], Any]]:
    """What a process reports, by the names of all roles."""
    for metric, value in metrics.items():
        by_lag = BY_LAG.fullmatch(metric)
        yield (f"train/lag_{by_lag[2]}", {"lag": by_lag[1]}, value) if by_lag else (grouped(role, metric), {}, value)
