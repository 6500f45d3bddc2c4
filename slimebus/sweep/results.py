"""What runs say together: each summed up from its records, those of one condition taken together; and how sure a comparison is.

Seeds are the sample: each claim on a condition rests on how its seeds differ. Statistics need scipy.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import msgspec

from slimebus.bus.errors import DataError
from slimebus.config.saved import FILE
from slimebus.sweep.plan import Sweep, label_of
from slimebus.sweep.runner import TrialOutcome, saved_outcome
from slimebus.view import report
from slimebus.view.report import STEP_PARTS, WARM_STEPS, Rows, main_dataset

Condition = dict[str, str]
ETA = "broker.max_staleness"
MEANS = ("ess_token", "ess_sequence", "m2", "clip_pressure", "kl_k3", "log_ratio_p95", "log_ratio_p99")
"""Of `lag/BUCKET/NAME`: averaged over the steps after the warm ones."""
BUCKETS = ("0", "1", "2", "3-4", "5-8", "9+")
RECORDS = ("trainer-settings.json", "status.json", FILE)
NOT_SETTINGS = ("name", "seed", "run_dir")
REWARD = "reward"
"""What a run is compared by that has no evaluation: of the samples trained in the last steps."""
REWARD_STEPS = 10
MIN_SEEDS = 3
"""Below it there is no claim on which condition learns better."""
SIGNIFICANT, POWER = 0.05, 0.8
NEAR_FASTEST = 0.01


class Point(msgspec.Struct):
    """An evaluation of a run: its score with the 95% interval of the problems, and what it took until then. is_rate: of rewards 0 or 1."""

    steps: int
    seconds: float
    samples: float
    score: float
    low: float
    high: float
    is_rate: bool = False


class RunResult(msgspec.Struct):
    """A run summed up. points: its evaluations; by_lag: bucket -> metric -> mean; samples_per_s: once warm. Times are of its steps."""

    name: str
    condition: Condition
    seed: int
    state: str = "done"
    reason: str = ""
    starts: int = 1
    score_name: str = REWARD
    points: list[Point] = []
    steps: int = 0
    seconds: float = 0.0
    samples_per_s: float = 0.0
    lag_mean: float = 0.0
    means: dict[str, float] = {}
    by_lag: dict[str, dict[str, float]] = {}

    @property
    def score(self) -> float:
        """The last one. Only where it has points."""
        return self.points[-1].score

    @property
    def counts(self) -> bool:
        """Whether it ran to its end and has a score."""
        return self.state == "done" and bool(self.points)


def read_sweep(sweep: Sweep, outcomes: Mapping[str, TrialOutcome]) -> list[RunResult]:
    """Of each trial that has begun, in order; one that failed early has a state and nothing else."""
    begun = [trial for trial in sweep.trials if outcomes[trial.name].state != "new"]
    return [_read_run(sweep.run_dir(t), t.name, t.condition, t.seed, sweep.plan.score, outcomes[t.name]) for t in begun]


def read_runs(run_dirs: Sequence[Path], score: str = "", axis: str = "") -> list[RunResult]:
    """The results of runs that exist; for a sweep's folder those of its trials, with their conditions. Other runs differ by their settings.

    axis: the setting that is compared, max_staleness by default. Raises DataError for a folder without records of a run.
    """
    folders = [run for folder in run_dirs for run in (sorted(p.parent for p in folder.glob("trials/*/trial.json")) or [folder])]
    known = [_settings(folder) for folder in folders]
    outcomes = [saved_outcome(folder) for folder in folders]
    is_one_sweep = all(outcomes) and len({tuple(outcome.condition) for outcome in outcomes if outcome}) == 1
    conditions = conditions_by_settings(known, axis or ETA) if all(known) else [{"run": str(folder)} for folder in folders]
    found = []
    for folder, settings, outcome, condition in zip(folders, known, outcomes, conditions, strict=True):
        shown = outcome.condition if outcome and is_one_sweep else condition
        seed = int(settings.get("seed", 0))
        found.append(_read_run(folder, folder.name, shown, seed, score, outcome or _outcome_without_sweep(folder, seed)))
        if outcome is None and not found[-1].steps:
            raise DataError(f"{folder}: no trained step on record (metrics/trainer.jsonl)")
    return sorted(found, key=lambda run: [(number(label) or 0.0, label) for label in run.condition.values()])


def _outcome_without_sweep(folder: Path, seed: int) -> TrialOutcome:
    """Of a run that no sweep started: done, unless its broker's last status says otherwise."""
    status = report.read_map(folder / "status.json")
    is_done = status.get("state", "finished") == "finished"
    reason = "" if is_done else f"{status['state']} at step {status.get('step')}"
    return TrialOutcome(condition={}, options={}, seed=seed, state="done" if is_done else "running", reason=reason)


def conditions_by_settings(settings: Sequence[Mapping[str, str]], axis: str) -> list[Condition]:
    """The conditions of runs with these settings: `axis`, and all else that differs, seeds apart, as one more axis.

    Where no two runs differ in `axis` alone that is part of the other; where one setting alone differs it is the axis.
    """
    names = sorted(set().union(*settings) - set(NOT_SETTINGS))
    names = [name for name in names if len({own.get(name) for own in settings}) > 1]
    axis = names[0] if len(names) == 1 else axis if axis in names else ""
    rest = [", ".join(f"{n.rpartition('.')[2]}={own.get(n, '')}" for n in names if n != axis) for own in settings]
    if axis and len(set(rest)) == len(set(zip(rest, (own.get(axis) for own in settings), strict=True))) > 1:
        return conditions_by_settings(settings, "")
    return [
        ({"settings": one} if one else {}) | ({axis: own.get(axis, "")} if axis else {}) for own, one in zip(settings, rest, strict=True)
    ]


def _settings(folder: Path) -> dict[str, str]:
    """What a run recorded of its own settings as text: those of the trainer, and the broker's bound by its config name."""
    found, status, saved = (report.read_map(folder / name) for name in RECORDS)
    eta = status.get("settings", {}).get("max_staleness")
    if saved.get("config", {}).get("broker", {}).get("max_staleness") == "auto":
        eta = "auto"  # the last of its bounds says little of the run
    found |= {name: text for name, text in saved.get("recorded", {}).items() if name not in found}  # reward, hooks, evaluations
    return {name: text.strip('"') for name, text in found.items()} | ({ETA: label_of(eta)} if eta is not None else {})


def _read_run(run_dir: Path, name: str, condition: Condition, seed: int, score: str, outcome: TrialOutcome) -> RunResult:
    result = RunResult(name=name, condition=condition, seed=seed, state=outcome.state, reason=outcome.reason, starts=outcome.starts)
    try:
        found = report.read_report(run_dir)
    except DataError:
        return result
    steps, warm = found.steps, found.steps[WARM_STEPS:] or found.steps
    seconds = list(accumulate(sum(row.get(part, 0.0) for part in STEP_PARTS) for row in steps))
    samples = list(accumulate(row.get("num_samples", 0.0) for row in steps))
    result.steps, result.seconds = len(steps), round(seconds[-1], 3)
    warm_s = sum(row.get(part, 0.0) for row in warm for part in STEP_PARTS) or 1.0
    result.samples_per_s = sum(row.get("num_samples", 0.0) for row in warm) / warm_s
    result.lag_mean = report.summarise(found)["lag_mean"]
    known = {row["dataset"] for row in found.evals}
    if score and known and score not in known:
        raise DataError(f"{run_dir}: no evaluation {score!r} on record; it has {', '.join(sorted(known))}")
    dataset = score or main_dataset(known)
    if dataset and (evals := found.evaluations(dataset)):
        result.score_name = dataset
        interval = int(_settings(run_dir).get("weights.update_weights_interval", 1))
        result.points = [_point(row, interval, seconds, samples) for row in evals]
    else:
        last = fmean(row["reward"] for row in steps[-REWARD_STEPS:])
        result.points = [Point(len(steps), seconds[-1], samples[-1], last, last, last)]
    result.means = {name: value for name in MEANS if (value := _mean(warm, f"lag/all/{name}")) is not None}
    result.by_lag = _by_lag(warm)
    return result


def _point(row: Mapping[str, Any], interval: int, seconds: Sequence[float], samples: Sequence[float]) -> Point:
    done = min(int(row["version"]) * interval, len(seconds))
    spent = (seconds[done - 1], samples[done - 1]) if done else (0.0, 0.0)
    return Point(done, *spent, row["mean_reward"], row["low"], row["high"], row.get("interval") == "wilson")


def _mean(rows: Rows, name: str) -> float | None:
    values = [row[name] for row in rows if name in row]
    return fmean(values) if values else None


def _by_lag(rows: Rows) -> dict[str, dict[str, float]]:
    """The trainer's metrics by the lag of tokens, its loss by the mean lag of the step, the engine's error by the lag measured at."""
    losses, errors = defaultdict(list), defaultdict(list)
    for row in rows:
        if "loss" in row:
            losses[bucket_of(row["lag_mean"])].append(row["loss"])
        if "mismatch/mean" in row:
            errors[bucket_of(row["mismatch/lag"])].append(row["mismatch/mean"])
    found: dict[str, dict[str, float]] = {}
    for bucket in BUCKETS:
        means = {name: _mean(rows, f"lag/{bucket}/{name}") for name in MEANS}
        means |= {name: fmean(values[bucket]) for name, values in (("loss", losses), ("mismatch", errors)) if bucket in values}
        if kept := {name: value for name, value in means.items() if value is not None}:
            found[bucket] = kept
    return found


def bucket_of(lag: float) -> str:
    """The bucket of a lag, rounded."""
    return next((bucket for bucket in BUCKETS[:-1] if round(lag) <= int(bucket.rpartition("-")[2])), BUCKETS[-1])


def number(label: str) -> float | None:
    """The label of an axis's value as a number."""
    try:
        return float(label)
    except ValueError:
        return None


def group_by_condition(results: Iterable[RunResult]) -> dict[tuple[str, ...], list[RunResult]]:
    """The runs of each condition, in order of their first."""
    found: dict[tuple[str, ...], list[RunResult]] = {}
    for result in results:
        found.setdefault(tuple(result.condition.values()), []).append(result)
    return found


class Estimate(msgspec.Struct, frozen=True):
    """A mean over seeds and its 95% interval (Student's t); the interval is None for one seed."""

    mean: float
    interval: tuple[float, float] | None
    n: int

    def text(self, digits: int = 3) -> str:
        """`0.912 (0.880–0.944)`."""
        between = f" ({self.interval[0]:.{digits}f}–{self.interval[1]:.{digits}f})" if self.interval else ""
        return f"{self.mean:.{digits}f}{between}"


def estimate(values: Sequence[float], *, least: float = -math.inf, most: float = math.inf) -> Estimate:
    """Of at least one value. least, most: what such a value can be; the interval goes no further."""
    from scipy import stats

    if len(values) < 2:
        return Estimate(fmean(values), None, len(values))
    half = float(stats.t.ppf(0.975, len(values) - 1) * stdev(values)) / math.sqrt(len(values))
    return Estimate(fmean(values), (max(least, fmean(values) - half), min(most, fmean(values) + half)), len(values))


def per_seed(runs: Sequence[RunResult], value: Callable[[RunResult], float]) -> list[float]:
    """The mean over the runs of each seed: repeats of one seed are one sample."""
    values = defaultdict[int, list[float]](list)
    for run in runs:
        values[run.seed].append(value(run))
    return [fmean(of) for of in values.values()]


def score_of(runs: Sequence[RunResult]) -> Estimate:
    """The last score of runs of one condition; that of rewards which are all 0 or 1 is a rate."""
    bounds = {"least": 0.0, "most": 1.0} if all(run.points[-1].is_rate for run in runs) else {}
    return estimate(per_seed(runs, lambda run: run.score), **bounds)


def speed_of(runs: Sequence[RunResult]) -> Estimate:
    """Samples a second, once warm."""
    return estimate(per_seed(runs, lambda run: run.samples_per_s), least=0.0)


def p_worse(values: Sequence[float], reference: Sequence[float]) -> float:
    """One-sided p of Welch's t-test that `values` have a lower mean than `reference`; each has two or more.

    Where no value differs from another within both there is no spread to test with: 0 for a lower mean, else 1.
    """
    from scipy import stats

    if min(values) == max(values) and min(reference) == max(reference):
        return float(values[0] >= reference[0])
    return float(stats.ttest_ind(values, reference, equal_var=False, alternative="less").pvalue)


def detectable(values: Sequence[float], reference: Sequence[float]) -> float:
    """The fall of the mean that such a test sees four times out of five, with the spread that these seeds have."""
    from scipy import stats

    freedom, spread = len(values) + len(reference) - 2, math.hypot(stdev(values), stdev(reference)) / math.sqrt(2)
    quantiles = stats.t.ppf(1 - SIGNIFICANT, freedom) + stats.t.ppf(POWER, freedom)
    return float(quantiles * spread * math.sqrt(1 / len(values) + 1 / len(reference)))


def short(axis: str) -> str:
    """How an axis is called in tables and sentences."""
    return "eta" if axis == ETA else axis.rpartition(".")[2]


def conclusion(results: Sequence[RunResult], axis: str) -> str:
    """One sentence on runs that differ in `axis` alone: its smallest value that costs no speed and no learning; or why none can be told."""
    labels = dict.fromkeys(r.condition[axis] for r in results)
    runs = {label: [r for r in results if r.counts and r.condition[axis] == label] for label in labels}
    lost = [f"{label} ({r.state})" for label, of in runs.items() if not of for r in results if r.condition[axis] == label][:1]
    runs = {label: of for label, of in runs.items() if of}
    if len(runs) < 2:
        return f"Nothing to compare: {len(runs)} value{'s'[: len(runs) != 1]} of {short(axis)} with a score."
    scores = {label: per_seed(of, lambda run: run.score) for label, of in runs.items()}
    speeds = {label: per_seed(of, lambda run: run.samples_per_s) for label, of in runs.items()}
    speed = {label: fmean(of) for label, of in speeds.items()}
    fastest, best = max(speed, key=speed.__getitem__), max(scores, key=lambda label: fmean(scores[label]))
    fewest = min(map(len, scores.values()))
    missing = f" Without a score: {', '.join(lost)}." if lost else ""
    if fewest < MIN_SEEDS:
        seen = f"{short(axis)} = {fastest} was the fastest and {best} ended highest ({fmean(scores[best]):.3f})"
        return f"Too few seeds to say which {short(axis)} learns better ({fewest}; at least {MIN_SEEDS}): {seen}.{missing}"
    if any(number(label) is None for label in runs):
        return _best_of(scores, best, score_of(runs[best]).text()) + missing
    return _smallest(scores, speeds, axis, fastest) + missing


def _p(p: float) -> str:
    return f"p = {p:.2g}" if p >= 0.001 else "p < 0.001"


def _best_of(scores: dict[str, list[float]], best: str, shown: str) -> str:
    p = {label: p_worse(values, scores[best]) for label, values in scores.items() if label != best}
    worse = [f"{label} ({_p(p[label])})" for label in p if p[label] < SIGNIFICANT]
    equal = [label for label in p if p[label] >= SIGNIFICANT]
    text = f"{best} ends highest ({shown}, {len(scores[best])} seeds)"
    text += f"; not told apart from it: {', '.join(equal)}" if equal else ""
    return text + (f"; worse: {', '.join(worse)}" if worse else "") + "."


def _smallest(scores: dict[str, list[float]], speeds: dict[str, list[float]], axis: str, fastest: str) -> str:
    ordered, name, speed = sorted(scores, key=float), short(axis), {label: fmean(of) for label, of in speeds.items()}
    least, near_words = ordered[0], f"within {NEAR_FASTEST:.0%} of the fastest, or not told apart from it"
    p = {label: p_worse(scores[label], scores[least]) if label != least else 1.0 for label in ordered}
    is_slower = {label: p_worse(speeds[label], speeds[fastest]) < SIGNIFICANT for label in ordered}
    near = [label for label in ordered if not is_slower[label] or speed[label] >= (1 - NEAR_FASTEST) * speed[fastest]]
    found = next((label for label in near if p[label] >= SIGNIFICANT), None)
    if found == least:
        return f"{name} = {least}, the smallest, is {near_words} ({name} = {fastest})."
    if found is not None:
        fall = detectable(scores[found], scores[least])
        sure = f"{_p(p[found])}, {len(scores[found])} seeds; a fall of {fall:.3f} would be seen four times out of five"
        return f"{name} = {found} is the smallest {near_words}, that does not learn worse than {name} = {least} ({sure})."
    others = max((label for label in ordered if p[label] >= SIGNIFICANT), key=speed.__getitem__)
    rest = f"of those that do not, {name} = {others} is the fastest ({speed[others] / speed[fastest]:.0%} of the samples/s of {fastest})"
    return f"Every {name} {near_words}, learns worse than {name} = {least} ({name} = {near[0]}: {_p(p[near[0]])}); {rest}."
