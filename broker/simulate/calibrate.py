"""A workload as a finished or running run has measured it, from the records under its directory."""

import contextlib
import itertools
import math
import os
import statistics
from pathlib import Path
from typing import Any

import msgspec

from broker.simulate.simulated_run import num_warm, simulate
from broker.simulate.workload import Workload
from slimebus.bus.errors import DataError
from slimebus.config.saved import FILE, saved_config
from slimebus.config.schema import RolloutConfig
from slimebus.view import report

FASTEST = 0.05
"""The quantile of the groups' times that stands for a group alone on its engine."""
SHARED = 0.02
"""Share of its training time in which the trainer waits for a core, from which on workers are taken to use the same cores."""
FITS, FITTED_STEPS = 4, 60
"""A worker's speed with many samples is fitted so that its simulation makes the tokens a busy second that were measured."""


def calibrate(run_dir: Path, cores: float | None = None) -> Workload:
    """The workload of a run: medians and means of what its trainer and workers recorded, once warm.

    Where the trainer waited for cores that workers used, it and they share these (None: those of this machine): each gets the speed that
    it would have alone. Raises DataError where a record is missing.
    """
    cores = cores or os.cpu_count() or 1
    found = report.read_report(run_dir)
    steps = found.steps[report.WARM_STEPS :] or found.steps
    workers = [rows for rows in found.workers if len(rows) > 1]
    if not workers or not found.status:
        raise DataError(f"{run_dir}: no records of workers and of the last status; the run must have ended or been stopped once")
    rates = [rate for rows in workers if (rate := _worker_token_rate(rows))]
    if not rates:
        raise DataError(f"{run_dir}: no worker has sampled for two versions or more; a longer run tells its speed")
    settings, lengths = found.status["settings"], _lengths(run_dir, workers)
    alone_s, pace = _train_seconds_alone(run_dir, steps)
    step_s, tokens_per_s = _trainer(steps, alone_s, Workload(lengths=lengths).mean_length)
    active = _worker_cores(cores, pace, len(workers), 1.0 - report.worker_idle(found.workers)) if pace < 1.0 - SHARED else 0.0
    newest = [row for row in found.evals if row["version"] == found.evals[-1]["version"]]
    rollout = _config(run_dir)
    rough = Workload(
        batch=settings["rollout_batch_size"],
        samples=settings["n_samples_per_prompt"],
        publish_interval=settings["update_weights_interval"],
        eval_interval=settings.get("eval_interval", 0),
        eval_samples=sum(row["num_samples"] for row in newest),
        max_staleness=math.inf if settings["max_staleness"] == "unbounded" else settings["max_staleness"],
        steps=len(found.steps),
        workers=len(workers),
        groups_per_worker=rollout.max_running_groups if rollout else max(1, round(max(row["running"] for rows in workers for row in rows))),
        lengths=lengths,
        worker_tokens_per_s=statistics.fmean(rates),
        token_s=_token_s(run_dir, lengths, settings["n_samples_per_prompt"]),
        step_s=step_s,
        trainer_tokens_per_s=tokens_per_s,
        publish_s=_between_steps(steps),
        pull_s=statistics.median(row["sync_s"] for rows in workers for row in rows),
        load_s=statistics.median(row.get("sync_load_s", 0.0) for rows in workers for row in rows),
        cores=cores if active else 0,
        worker_cores=active or 1.0,
    )
    return _fit_worker_rate(rough, statistics.fmean(rates))


def measure_run(run_dir: Path) -> tuple[float, float]:
    """Steps a second and mean lag of a run, without as many first steps as a simulation leaves out."""
    steps = report.read_report(run_dir).steps
    warm = steps[num_warm(len(steps)) :]
    seconds, samples = warm[-1]["elapsed_s"] - warm[0]["elapsed_s"], sum(row["num_samples"] for row in warm)
    return (len(warm) - 1) / (seconds or math.inf), sum(row["lag_mean"] * row["num_samples"] for row in warm) / (samples or 1.0)


def _fit_worker_rate(rough: Workload, tokens_per_s: float) -> Workload:
    """The workload with so many tokens a busy second of its workers, with the tails of their batches and what shares their cores."""
    found = rough
    for _ in range(FITS):
        made = simulate(msgspec.structs.replace(found, steps=min(found.steps, FITTED_STEPS))).worker_tokens_per_s
        found = msgspec.structs.replace(found, worker_tokens_per_s=found.worker_tokens_per_s * tokens_per_s / made)
    return found


def _config(run_dir: Path) -> RolloutConfig | None:
    return saved_config(run_dir).config.rollout if (run_dir / FILE).is_file() else None


def _train_seconds_alone(run_dir: Path, steps: list[dict[str, Any]]) -> tuple[list[float], float]:
    """Seconds that each step's training takes on cores of its own, and by how much others slow it down (1: not at all)."""
    spans = {row["step"]: row for row in report.read_rows(run_dir / "metrics" / "spans-trainer.jsonl") if row["name"] == "train"}
    alone = [row["train_s"] - spans.get(row["step"], {}).get("queued_s", 0.0) for row in steps]
    return alone, sum(alone) / (sum(row["train_s"] for row in steps) or 1.0)


def _worker_cores(cores: float, pace: float, workers: int, busy: float) -> float:
    """Cores that a busy worker keeps busy, from the trainer's mean pace beside workers that are busy for this share of the time."""
    beside = max(0.1, 1.0 - (1.0 - pace) / max(busy, 1.0 - pace))
    return max(0.1, (cores / beside - 1.0) / workers)


def _trainer(steps: list[dict[str, Any]], seconds: list[float], mean_length: float) -> tuple[float, float]:
    """Seconds of a step without tokens, and tokens a second, by least squares over the steps; in proportion where that says nothing.

    Tokens of groups without a gradient cost nothing, so those of the whole batch are trained the quicker.
    """
    made = [row["num_samples"] * mean_length for row in steps]
    trained = [row.get("tokens_trained", tokens) for row, tokens in zip(steps, made, strict=True)]
    step_s, slope = 0.0, sum(seconds) / (sum(trained) or 1.0)
    with contextlib.suppress(statistics.StatisticsError):
        line = statistics.linear_regression(trained, seconds)
        if line.slope > 0 and line.intercept > 0:
            step_s, slope = line.intercept, line.slope
    return step_s, sum(made) / max(1e-9, slope * sum(trained))


def _worker_token_rate(rows: list[dict[str, Any]]) -> float:
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
