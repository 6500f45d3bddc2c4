"""A workload as a finished or running run has measured it, from the records under its directory."""

import itertools
import math
import statistics
from pathlib import Path
from typing import Any

from broker.simulate.workload import Workload
from slimebus.bus.errors import DataError
from slimebus.view import report

FASTEST = 0.05
"""The quantile of the groups' times that stands for a group alone on its engine."""


def calibrate(run_dir: Path) -> Workload:
    """The workload of a run: medians and means of what its trainer and workers recorded, once warm.

    Evaluations are not part of it: they take workers' time that a simulation gives to training. Raises DataError where a record is missing.
    """
    found = report.read(run_dir)
    steps = found.steps[report.WARM_STEPS :] or found.steps
    workers = [rows for rows in found.workers if len(rows) > 1]
    if not workers or not found.status:
        raise DataError(f"{run_dir}: no records of workers and of the last status; the run must have ended or been stopped once")
    lengths = _lengths(run_dir, workers)
    mean = Workload(lengths=lengths).mean_length
    samples, train_s = (statistics.fmean(row[name] for row in steps) for name in ("num_samples", "train_s"))
    rates = [rate for rows in workers if (rate := _rate(rows))]
    if not rates:
        raise DataError(f"{run_dir}: no worker has sampled for two versions or more; a longer run tells its speed")
    settings = found.status["settings"]
    return Workload(
        batch=settings["rollout_batch_size"],
        samples=settings["n_samples_per_prompt"],
        publish_interval=settings["update_weights_interval"],
        over_sampling=settings["over_sampling_batch_size"],
        max_staleness=math.inf if settings["max_staleness"] == "unbounded" else settings["max_staleness"],
        steps=len(found.steps),
        workers=len(workers),
        groups_per_worker=max(1, round(max(row["running"] for rows in workers for row in rows))),
        lengths=lengths,
        worker_tokens_per_s=statistics.fmean(rates),
        token_s=_token_s(run_dir, lengths, settings["n_samples_per_prompt"]),
        step_s=0.0,
        trainer_tokens_per_s=samples * mean / train_s,
        publish_s=_between_steps(steps),
        pull_s=statistics.median(row["sync_s"] for rows in workers for row in rows),
    )


def _rate(rows: list[dict[str, Any]]) -> float:
    """Tokens a second of one worker while it was busy."""
    first, last = rows[min(report.WARM_STEPS, len(rows) - 2)], rows[-1]
    busy_s = last["busy_s"] - first["busy_s"]
    return float(last["tokens"] - first["tokens"]) / busy_s if busy_s > 0 else 0.0


def _between_steps(steps: list[dict[str, Any]]) -> float:
    """Seconds of a step in which the trainer neither waits for a batch nor trains: publishes, saves, commits."""
    rest = [b["elapsed_s"] - a["elapsed_s"] - b["wait_s"] - b["train_s"] for a, b in itertools.pairwise(steps)]
    return max(0.0, statistics.fmean(rest)) if rest else 0.0


def _lengths(run_dir: Path, workers: list[list[dict[str, Any]]]) -> tuple[float, ...]:
    """Quantiles of the trained tokens of a sample: the mean of each over the steps; of runs that did not record them, all are the mean."""
    rows = [row["lengths"] for row in report.read_rows(run_dir / "metrics" / "batches.jsonl") if "lengths" in row]
    if rows:
        return tuple(max(1.0, statistics.fmean(column)) for column in zip(*rows, strict=True))
    last = [rows[-1] for rows in workers]
    return (max(1.0, sum(row["tokens"] for row in last) / max(1.0, sum(row["samples"] for row in last))),)


def _token_s(run_dir: Path, lengths: tuple[float, ...], samples: int) -> float:
    """Least seconds a token: of the fastest groups, by the length of their longest sample."""
    spans = (row for file in (run_dir / "metrics").glob("spans-*.jsonl") for row in report.read_rows(file))
    seconds = sorted(row["seconds"] for row in spans if row["name"] == "sample" and row.get("kind") == "train" and "failed" not in row)
    if not seconds:
        return 0.0
    longest = lengths[min(len(lengths) - 1, round((len(lengths) - 1) * samples / (samples + 1)))]
    return float(seconds[int(FASTEST * len(seconds))]) / longest
