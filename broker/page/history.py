"""The records of a run, read as they grow, and thinned for a screen.

R steps on record   P points of a chart: at most MAX_POINTS, each the mean of as many steps as the others
"""

import contextlib
import functools
import logging
import math
import os
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from slimebus.view.advice import advice, shares_of
from slimebus.view.report import STEP_PARTS, WARM_STEPS, rows_of, worker_idle

log = logging.getLogger("slimebus.page")

CHUNK_BYTES = 4 << 20
"""Read at once: a long run's records are taken in while the page is served."""
MAX_POINTS = 600
MAX_EVALUATIONS = 500
MAX_STEP = 1 << 53
"""Beyond it two steps may be one number of a chart."""
VERSIONS_SHOWN = 12
WARNINGS_SHOWN, WARNINGS_BYTES = 60, 64 << 10
OPTIMISED = ("grad_norm", "lr", "entropy", "kl_loss", "approx_kl", "pg_clipfrac", "lag/all/ess_token", "lag/all/ess_sequence")
"""What an optimizer step reports beside its loss; of each algorithm a part."""
MEANS = (*OPTIMISED, "reward", "loss", "lag_mean", "ready", "leased", "queued", "wait_s", "train_s", "publish_s", "save_s")
COUNTED = ("step", "time", "version", "lag_max", "tokens", "rollout_tokens", "wasted_tokens")
WEIGHTS = ("weights_version", "weights_copy_s", "weights_encode_s", "weights_delta_bytes", "weights_total_bytes")
STAGES = ("wire", "verify", "share", "load")


class Tail:
    """The rows added to a file of JSON lines since the last look; from its beginning again when it became shorter."""

    def __init__(self, path: Path) -> None:
        self.path, self._at = path, 0

    def rows(self) -> list[dict[str, Any]]:
        """The next rows, CHUNK_BYTES of them at most; a line that is no JSON object is left out."""
        try:
            with self.path.open("rb") as file:
                self._at = 0 if os.fstat(file.fileno()).st_size < self._at else self._at
                file.seek(self._at)
                whole, end, _ = file.read(CHUNK_BYTES).rpartition(b"\n")
        except OSError:
            return []
        self._at += len(whole) + len(end)
        return list(rows_of(whole))


class History:
    """What the files under RUN_DIR/metrics say. One thread reads; `serial` rises with each look that found something."""

    def __init__(self, run_dir: Path) -> None:
        self.folder, self.serial = run_dir / "metrics", 0
        self.columns = {name: array("d") for name in (*COUNTED, *MEANS)}
        self.lags: dict[str, array[float]] = {}
        """Bucket of lag -> its trained tokens, a step an entry."""
        self.evaluations: dict[tuple[str, int], dict[str, Any]] = {}
        self.workers: dict[str, list[dict[str, Any]]] = {}
        """Worker -> its rows until it is warm, and the last."""
        self.versions: dict[int, dict[str, Any]] = {}
        self.last: dict[str, Any] = {}
        """The newest step's row."""
        self._steps, self._rollouts = Tail(self.folder / "broker.jsonl"), dict[Path, Tail]()

    def read(self) -> bool:
        """Take in what is new, a few megabytes at most; whether there was anything."""
        rows = self._steps.rows()
        for row in rows:
            self._add(self._add_evaluation if "evaluation" in row else self._add_step, row)
        for path in self.folder.glob("rollout-*.jsonl"):
            served = self._rollouts.setdefault(path, Tail(path)).rows()
            rows += served
            for row in served:
                self._add(functools.partial(self._add_served, path.stem.removeprefix("rollout-")), row)
        self.serial += bool(rows)
        return bool(rows)

    def _add(self, take_in: Callable[[dict[str, Any]], None], row: dict[str, Any]) -> None:
        try:
            take_in(row)
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as bad:
            log.warning("the page leaves out a row of %s that is none of ours (%r): %.200s", self.folder, bad, row)

    def _add_evaluation(self, row: dict[str, Any]) -> None:
        if math.isfinite(_number(row.get("mean_reward"))):
            self.evaluations[row["dataset"], row["version"]] = row
        if len(self.evaluations) > MAX_EVALUATIONS:
            del self.evaluations[next(iter(self.evaluations))]

    def _add_step(self, row: dict[str, Any]) -> None:
        """A step; a trainer that went back trains steps again, which replace those of before."""
        if "settings" in row:
            return
        columns, step, metrics = self.columns, row["step"], dict(row.get("metrics", {}))
        if not isinstance(step, int) or abs(step) > MAX_STEP:
            raise TypeError("its step is no number of a step")
        while columns["step"] and columns["step"][-1] >= step:
            for column in (*columns.values(), *self.lags.values()):
                column.pop()
        num_steps = len(columns["step"])
        for name, column in columns.items():
            column.append(_number(metrics.get(name) if name in MEANS and name not in row else row.get(name)))
        for name, value in metrics.items():
            if name.startswith("lag/") and name.endswith("/tokens") and name != "lag/all/tokens":
                self.lags.setdefault(name.split("/")[1], array("d", [0.0] * num_steps)).append(_number(value))
        for column in self.lags.values():
            column.extend([0.0] * (num_steps + 1 - len(column)))
        self.last = row
        if "weights_version" in metrics:
            self._record_of(int(metrics["weights_version"])).update({name: metrics.get(name) for name in WEIGHTS})

    def _add_served(self, worker: str, row: dict[str, Any]) -> None:
        rows, times = self.workers.setdefault(worker, []), {name: _number(row.get(name, 0.0)) for name in ("serving_s", "busy_s")}
        if not math.isfinite(sum(times.values())):
            raise TypeError("its times are no numbers")
        if rows and times["serving_s"] < rows[-1]["serving_s"]:
            rows.clear()  # another process of that name
        rows[WARM_STEPS + 1 :] = [times]
        self._add_pull(worker, int(row.get("step", -1)), row)

    def add_pulls(self, clients: list[dict[str, Any]]) -> None:
        """How long workers took to serve their versions, by their heartbeats, of those with records on another machine."""
        for client in clients:
            if client["name"] not in self.workers:
                self._add_pull(client["name"], client["version"], client["metrics"])

    def _add_pull(self, worker: str, version: int, metrics: dict[str, Any]) -> None:
        took = [_number(metrics.get(name, 0.0)) for name in ("sync_s", *(f"sync_{stage}_s" for stage in STAGES))]
        if took[0] and math.isfinite(sum(took)):
            pulls = self._record_of(version).setdefault("pulls", {})
            self.serial += pulls.get(worker) != took
            pulls[worker] = took

    def _record_of(self, version: int) -> dict[str, Any]:
        found = self.versions.setdefault(version, {})
        for old in sorted(self.versions)[:-VERSIONS_SHOWN]:
            del self.versions[old]
        return found

    # --- what is shown ---

    def charts(self) -> dict[str, Any]:
        """What the charts are drawn from."""
        return self.chart_columns() | {"evaluations": list(self.evaluations.values()), "weights": self.weights()}

    def remarks(self, status: dict[str, Any]) -> dict[str, Any]:
        """What there is to say beside a status."""
        return {"advice": self.advice(status), "warnings": self.warnings()}

    def chart_columns(self) -> dict[str, Any]:
        """The charts' columns, [P] each: means over equal numbers of steps, rates since the point before; None where nothing is known."""
        num_steps = len(self.columns["step"])
        if not num_steps:
            return {"step": []}
        stride = 1 << max(0, math.ceil(math.log2(num_steps / MAX_POINTS)))
        starts, ends = np.arange(0, num_steps, stride), np.append(np.arange(stride, num_steps, stride), num_steps) - 1
        raw = {name: np.array(column) for name, column in self.columns.items()}
        found = {name: _means(raw[name], starts) for name in MEANS} | {name: raw[name][ends] for name in ("step", "time", "wasted_tokens")}
        found["lag_max"] = np.maximum.reduceat(raw["lag_max"], starts)
        seconds = np.diff(found["time"], prepend=math.nan)
        seconds[seconds <= 0] = math.nan
        found["steps_per_s"] = np.diff(found["step"], prepend=math.nan) / seconds
        found["tokens_per_s"] = np.add.reduceat(np.nan_to_num(raw["tokens"]), starts) / seconds
        found["rollout_tokens_per_s"] = np.diff(raw["rollout_tokens"][ends], prepend=math.nan).clip(min=0) / seconds
        lags = {name: _as_list(_means(np.array(column), starts)) for name, column in sorted(self.lags.items())}
        return {name: _as_list(values) for name, values in found.items()} | {"lags": lags}

    def weights(self) -> list[dict[str, Any]]:
        """The newest versions: what publishing took, how many workers have it, the median seconds of each stage, the slowest worker."""
        rows = []
        for version, found in sorted(self.versions.items(), reverse=True):
            pulls = found.get("pulls", {})
            slowest = max(pulls, key=lambda name: pulls[name][0], default="")
            medians = np.median(list(pulls.values()), axis=0).tolist() if pulls else [None] * (1 + len(STAGES))
            names = [f"{stage}_s" for stage in ("sync", *STAGES)]
            own = {name.removeprefix("weights_"): found.get(name) for name in WEIGHTS[1:]}
            about = {"version": version, "workers": len(pulls), "slowest": slowest, "slowest_s": pulls[slowest][0] if slowest else None}
            rows.append(about | own | dict(zip(names, medians, strict=True)))
        return rows

    def advice(self, status: dict[str, Any]) -> list[str]:
        """What the idle shares and the waste so far say."""
        parts = {name: np.nan_to_num(np.array(self.columns[name])) for name in STEP_PARTS}
        warm = {name: values[WARM_STEPS if len(values) > WARM_STEPS else 0 :] for name, values in parts.items()}
        seconds = {name: float(values.sum()) for name, values in warm.items()}
        rows = [served for served in self.workers.values() if len(served) > 1]
        found = shares_of(
            status,
            steps=len(self.columns["step"]),
            trainer_idle=seconds["wait_s"] / (sum(seconds.values()) or 1.0),
            longest_wait=float(warm["wait_s"].max(initial=0.0)) / (seconds["wait_s"] or 1.0),
            worker_idle=worker_idle(rows) if rows else None,
            workers=len(rows) or int(status.get("pace", {}).get("workers", 0)),
            tokens=float(np.nansum(np.array(self.columns["tokens"]))),
        )
        return advice(found)

    def warnings(self) -> list[dict[str, Any]]:
        """The newest warnings and errors that processes on this machine logged, newest first."""
        found = []
        for path in (self.folder.parent / "logs").glob("warnings-*.jsonl"):
            with contextlib.suppress(OSError), path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - WARNINGS_BYTES))
                found += list(rows_of(file.read()))
        return sorted(found, key=lambda row: -np.nan_to_num(_number(row.get("time"))))[:WARNINGS_SHOWN]


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and abs(value) <= sys.float_info.max else math.nan


def _means(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Means of values [R] from each start to the next, [P], of those that are known."""
    known = ~np.isnan(values)
    sums, counts = np.add.reduceat(np.where(known, values, 0.0), starts), np.add.reduceat(known.astype(float), starts)
    means: np.ndarray = np.divide(sums, counts, out=np.full(len(starts), math.nan), where=counts > 0)
    return means


def _as_list(values: np.ndarray) -> list[float | None]:
    return [float(f"{v:.5g}") if abs(v) < 1e5 else round(v, 1) if math.isfinite(v) else None for v in values.tolist()]
