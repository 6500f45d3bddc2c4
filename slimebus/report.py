"""What a run did, read from the records it left under metrics/ (trainer.jsonl, broker.jsonl, rollout-*.jsonl) and status.json."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from slimebus.chart import Curve
from slimebus.errors import DataError

WARM_STEPS = 5
"""Steps left out of idle shares: engines start, first weights are pulled whole, the pipeline fills."""

Rows = list[dict[str, Any]]


class Report(msgspec.Struct):
    """A run's records. steps: the trainer's rows, each step once; evals: finished evaluations, oldest version first.

    workers: for each rollout worker its rows, one for each version it served.
    """

    steps: Rows
    evals: Rows
    workers: list[Rows]
    status: dict[str, Any]

    def evaluations(self, dataset: str) -> Rows:
        """Rows of one dataset, by version."""
        return [row for row in self.evals if row["dataset"] == dataset]


def read(run_dir: Path) -> Report:
    """The records under `run_dir`. Raises DataError when it holds none."""
    steps = {row["step"]: row for row in _rows(run_dir / "metrics" / "trainer.jsonl")}
    if not steps:
        raise DataError(f"{run_dir}: no trained step on record (metrics/trainer.jsonl)")
    status_file = run_dir / "status.json"
    status = json.loads(status_file.read_text()) if status_file.is_file() else {}
    evals = {(row["dataset"], row["version"]): row for row in _rows(run_dir / "metrics" / "broker.jsonl") if "evaluation" in row}
    ordered = [evals[key] for key in sorted(evals, key=lambda k: k[1])]
    workers = [_rows(file) for file in sorted((run_dir / "metrics").glob("rollout-*.jsonl"))]
    return Report([steps[s] for s in sorted(steps)], ordered, workers, status)


def _rows(file: Path) -> Rows:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def mean(values: Iterable[float]) -> float:
    """Their mean; 0 for none."""
    found = list(values)
    return sum(found) / len(found) if found else 0.0


def summarise(report: Report) -> dict[str, Any]:
    """Steps, lag, dropped groups by reason, delta size and idle shares of a run (the keys of result.json)."""
    steps = report.steps
    samples = [row.get("num_samples", 0.0) for row in steps]
    total = sum(samples) or 1.0
    return {
        "steps": len(steps),
        "lag_mean": round(sum(row["lag_mean"] * n for row, n in zip(steps, samples, strict=True)) / total, 4),
        "lag_max": int(max(row["lag_max"] for row in steps)),
        "dropped": dropped(report.status),
        "delta_fraction": round(
            mean(r["weights_delta_bytes"] / r["weights_total_bytes"] for r in steps if r.get("weights_delta_bytes")), 4
        ),
        "trainer_idle": round(trainer_idle(steps), 4),
        "worker_idle": round(worker_idle(report.workers), 4),
    }


UNUSED = "unused: "


def dropped(status: dict[str, Any]) -> dict[str, int]:
    """Groups that were sampled and gave no gradient, by reason: wasted ones, and those the trainer had no use for."""
    found = {reason: waste["groups"] for reason, waste in status.get("waste", {}).items() if waste["groups"]}
    unused = {name.removeprefix(UNUSED): n for name, n in status.get("counted", {}).items() if name.startswith(UNUSED)}
    return found | unused


def trainer_idle(steps: Rows) -> float:
    """Share of its time that the trainer waited for batches, once warm."""
    warm = steps[WARM_STEPS:] or steps
    waited = float(sum(row["wait_s"] for row in warm))
    return waited / (sum(row["wait_s"] + row["train_s"] + row["publish_s"] + row["save_s"] for row in warm) or 1.0)


def worker_idle(workers: list[Rows]) -> float:
    """Share of their time that workers had nothing to sample, once warm, over all workers."""
    spans = [(rows[min(WARM_STEPS, len(rows) - 1)], rows[-1]) for rows in workers if len(rows) > 1]
    serving = float(sum(last["serving_s"] - first["serving_s"] for first, last in spans))
    busy = float(sum(last["busy_s"] - first["busy_s"] for first, last in spans))
    return 1.0 - busy / serving if serving else 0.0


def curve(report: Report, dataset: str, max_staleness: float) -> Curve:
    """The points of the run's picture; time 0 is when the trainer started."""
    start = report.steps[0]["time"] - report.steps[0]["elapsed_s"]
    points = [{"t": r["time"] - start, "step": r["step"] + 1, **{k: r[k] for k in ("reward", "lag_mean", "lag_max")}} for r in report.steps]
    evals = [
        {"t": max(0.0, r["time"] - start), "step": r["version"], "accuracy": r["mean_reward"], "low": r["low"], "high": r["high"]}
        for r in report.evaluations(dataset)
        if r["mean_reward"] is not None
    ]
    return {"steps": points, "evals": evals, "max_staleness": max_staleness}  # type: ignore[typeddict-item]
