"""What a run did, read from the records it left under metrics/ (trainer, broker, rollout-*.jsonl) and status.json; its table."""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from slimebus.bus.errors import DataError
from slimebus.config import RunConfig
from slimebus.telemetry.formatting import format_duration
from slimebus.telemetry.scores import wilson

if TYPE_CHECKING:
    from rich.table import Table

WARM_STEPS = 5
"""Steps left out of idle shares: engines start, first weights are pulled whole, the pipeline fills."""
UNUSED = "unused: "
STEP_PARTS = ("wait_s", "train_s", "publish_s", "save_s")

Rows = list[dict[str, Any]]
REASONS = {"zero_variance": "groups with equal rewards", "too_stale": "too stale", "stale": "too stale"}
"""Why groups trained nothing, in words."""
Result = Mapping[str, Any]
"""The keys of result.json. Times in seconds, lags in versions, fractions and accuracies in 0..1:

accuracy_before, accuracy_after, heldout_problems (on how many both were measured), steps, rl_s, total_s, lag_mean, lag_max, max_staleness,
dropped (groups by reason), delta_fraction (mean size of a pulled delta, of the full model's), trainer_idle and worker_idle (share of the
RL phase spent waiting), seed.
"""


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


def result_table(result: Result) -> "Table":
    """Two columns, what and how much, for `rich.print`; what was not measured (a missing key) has no row."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, text in table_rows(result).items():
        table.add_row(name, text)
    return table


def table_rows(result: Result) -> dict[str, str]:
    """The table's lines, as rich markup."""
    found = {}
    for name, text in TEXTS.items():
        try:
            found[name] = text(result)
        except KeyError:
            continue
    return found


def _accuracies(result: Result) -> str:
    n = result["heldout_problems"]
    before, after = (_with_interval(result[key], n) for key in ("accuracy_before", "accuracy_after"))
    return f"{before} → [bold green]{after}[/] on {n} problems"


def _with_interval(mean: float, n: int) -> str:
    interval = " ({:.3f}–{:.3f})".format(*wilson(mean, n)) if 0 <= mean <= 1 else ""  # of rewards from 0 to 1
    return f"{mean:.3f}{interval}"


def _time(result: Result) -> str:
    in_all = f" of RL, {format_duration(result['total_s'])} in all" if "total_s" in result else ""
    return f"{format_duration(result['rl_s'])}{in_all}"


def _dropped(result: Result) -> str:
    from rich.markup import escape

    by_size = sorted(result["dropped"].items(), key=lambda item: -item[1])
    return ", ".join(f"{n} {escape(REASONS.get(reason, reason))}" for reason, n in by_size) or "none"


TEXTS: dict[str, Callable[[Result], str]] = {
    "held-out reward": _accuracies,
    "steps": lambda r: f"{r['steps']}",
    "time": _time,
    "lag": lambda r: f"mean {r['lag_mean']:.2f}, largest {r['lag_max']:g}, bound {r['max_staleness']:g} versions",
    "trained nothing": _dropped,
    "delta size": lambda r: f"{r['delta_fraction']:.1%} of the model",
    "trainer idle": lambda r: f"{r['trainer_idle']:.0%}",
    "workers idle": lambda r: f"{r['worker_idle']:.0%}",
    "seed": lambda r: f"{r['seed']}",
}
