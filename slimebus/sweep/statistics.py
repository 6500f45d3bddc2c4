"""How sure a comparison is. Seeds are the sample: each claim on a condition rests on how its seeds differ. Needs scipy."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import fmean, stdev

import msgspec

from slimebus.sweep.results import ETA, RunResult, number

MIN_SEEDS = 3
"""Below it there is no claim on which condition learns better."""
SIGNIFICANT, POWER = 0.05, 0.8
NEAR_FASTEST = 0.01


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
