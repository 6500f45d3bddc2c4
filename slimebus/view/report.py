"""What a run did, read from the records it left under metrics/ (trainer.jsonl, broker.jsonl, rollout-*.jsonl) and status.json."""

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import urlsplit

import msgspec

from slimebus.bus.errors import DataError
from slimebus.config import RunConfig

WARM_STEPS = 5
"""Steps left out of idle shares: engines start, first weights are pulled whole, the pipeline fills."""
UNUSED = "unused: "
STEP_PARTS = ("wait_s", "train_s", "publish_s", "save_s")

Rows = list[dict[str, Any]]


class RunReport(msgspec.Struct):
    """A run's records. steps: the trainer's rows, each step once; evals: finished evaluations, oldest version first.

    workers: for each rollout worker its rows, one for each version it served.
    """

    steps: Rows
    evals: Rows
    workers: list[Rows]
    status: dict[str, Any]

    def evaluations(self, dataset: str) -> Rows:
        """Rows of one dataset that have a score, by version."""
        return [row for row in self.evals if row["dataset"] == dataset and row["mean_reward"] is not None]


def read_report(run_dir: Path) -> RunReport:
    """The records under `run_dir`. Raises DataError when it holds none."""
    metrics = run_dir / "metrics"
    steps = {row["step"]: row for row in read_rows(metrics / "trainer.jsonl") if "step" in row}
    if not steps:
        raise DataError(f"{run_dir}: no trained step on record (metrics/trainer.jsonl)")
    evals = {(row["dataset"], row["version"]): row for row in read_rows(metrics / "broker.jsonl") if "evaluation" in row}
    return RunReport(
        steps=[steps[s] for s in sorted(steps)],
        evals=[evals[key] for key in sorted(evals, key=lambda k: k[1])],
        workers=[read_rows(file) for file in sorted(metrics.glob("rollout-*.jsonl"))],
        status=read_map(run_dir / "status.json"),
    )


def read_map(file: Path) -> dict[str, Any]:
    """What a JSON file of a run directory says; nothing where there is none. Raises DataError when it is damaged."""
    try:
        return dict(json.loads(file.read_bytes()).items()) if file.is_file() else {}
    except (ValueError, AttributeError, RecursionError) as bad:
        raise DataError(f"{file} is damaged: {bad}; take another run, or remove the file") from None


def read_rows(file: Path) -> Rows:
    """The rows of a file of JSON lines; none where there is no such file."""
    return list(rows_of(file.read_bytes())) if file.is_file() else []


def rows_of(text: bytes) -> Iterator[dict[str, Any]]:
    """The rows of JSON lines; one that was cut off by a kill is left out."""
    for line in text.splitlines():
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            yield msgspec.json.decode(line, type=dict[str, Any])


def main_dataset(names: Iterable[str]) -> str:
    """The evaluation with the mean reward that stands for the run: `heldout`, else the first; empty without any."""
    known = list(names)
    return "heldout" if "heldout" in known else next(iter(known), "")


def page_url(run_dir: Path) -> str:
    """Where the run's broker serves, or last served, the run's page; empty where it serves none, or its file is damaged."""
    with contextlib.suppress(OSError, ValueError):
        url = (run_dir / "page.url").read_text()
        return url if urlsplit(url).port else ""
    return ""


def summarise(report: RunReport) -> dict[str, Any]:
    """Steps, lag, dropped groups by reason, delta size and idle shares of a run (the keys of result.json)."""
    steps = report.steps
    samples = [row.get("num_samples", 0.0) for row in steps]
    sizes = [(row.get("weights_delta_bytes", 0), row.get("weights_total_bytes", 0)) for row in steps]
    deltas = [delta / total for delta, total in sizes if delta < total]  # the first version is whole
    return {
        "steps": len(steps),
        "lag_mean": round(sum(row["lag_mean"] * n for row, n in zip(steps, samples, strict=True)) / (sum(samples) or 1.0), 4),
        "lag_max": int(max(row["lag_max"] for row in steps)),
        "dropped": dropped_groups(report.status),
        "delta_fraction": round(fmean(deltas or [0.0]), 4),
        "trainer_idle": round(trainer_idle(steps), 4),
        "worker_idle": round(worker_idle(report.workers), 4),
    }


def make_result(report: RunReport, dataset: str, config: RunConfig) -> dict[str, Any]:
    """The keys of result.json that the records of one run tell; those of the accuracy when `dataset` was evaluated twice or more."""
    found = {**summarise(report), "max_staleness": config.broker.most_stale, "rl_s": report.steps[-1]["elapsed_s"], "seed": config.seed}
    evals = report.evaluations(dataset)
    if len(evals) > 1:
        found |= {"accuracy_before": evals[0]["mean_reward"], "accuracy_after": evals[-1]["mean_reward"]}
        found["heldout_problems"] = evals[-1]["num_samples"]
    return found


def dropped_groups(status: dict[str, Any]) -> dict[str, int]:
    """Groups that were sampled and trained nothing, by reason: wasted ones, and those that were trained without a gradient."""
    found = {reason: waste["groups"] for reason, waste in status.get("waste", {}).items() if waste["groups"]}
    unused = {name.removeprefix(UNUSED): n for name, n in status.get("counted", {}).items() if name.startswith(UNUSED)}
    return found | unused


def trainer_idle(steps: Rows) -> float:
    """Share of its time that the trainer waited for batches, once warm."""
    warm = steps[WARM_STEPS:] or steps
    seconds = [float(sum(row[part] for row in warm)) for part in STEP_PARTS]
    return seconds[0] / (sum(seconds) or 1.0)


def worker_idle(workers: list[Rows]) -> float:
    """Share of their time that workers had nothing to sample, once warm, over all workers."""
    spans = [(rows[min(WARM_STEPS, len(rows) - 1)], rows[-1]) for rows in workers if len(rows) > 1]
    serving, busy = (sum(last[key] - first[key] for first, last in spans) for key in ("serving_s", "busy_s"))
    return 1.0 - busy / serving if serving else 0.0
