"""Three sentences on a run, from what it measured: which side waits, what the bound on staleness does, what is wasted."""

import math
from typing import Any

import msgspec

from slimebus.view.report import UNUSED, WARM_STEPS

BOTTLENECK_IDLE = 0.05
"""A side that waits for less of its time than this is not worth a change."""
AT_BOUND = 0.2
"""With so many of the trained groups at the bound, or more, it may hold workers back."""
ONE_WAIT = 0.5
"""Where one batch had more of the trainer's waiting than this, something had failed: more workers are no remedy."""
MIN_STEPS = 2 * WARM_STEPS
"""Idle shares of fewer are those of the start."""
REMEDIES = {
    "stale": "a larger broker.max_staleness or fewer workers would waste less",
    "zero_variance": "prompts that are neither too easy nor too hard, or more samples of each, would give more gradient",
    "begun anew": "sessions outlive the bound: a larger broker.max_staleness, or fewer groups at once, would let them end",
    "failed": "errors of hooks and rewards cost samples; the worker's log names them",
    "filter": "prompts that the filter keeps would save their sampling",
}
"""Part of a reason -> what would help."""


class RunShares(msgspec.Struct, kw_only=True, frozen=True):
    """How the time and the samples of a run were spent.

    steps: trained. trainer_idle: share of its time that the trainer waited for batches. worker_idle: share of theirs that workers had
    nothing to sample; None where that is not known. longest_wait: share of the trainer's waiting that one batch had. tokens: trained.
    lags: staleness in versions -> trained groups. wasted: reason -> tokens not trained. unused: reason -> trained groups that gave
    no gradient.
    """

    steps: int
    trainer_idle: float
    worker_idle: float | None
    workers: int
    tokens: float
    longest_wait: float = 0.0
    max_staleness: float
    lags: dict[int, int]
    wasted: dict[str, int]
    unused: dict[str, int]


def shares_of(status: dict[str, Any], **of_records: Any) -> RunShares:
    """What the records tell, by the names above, with what a status says of lag and waste (docs/protocol.md)."""
    bound = status.get("settings", {}).get("max_staleness")
    return RunShares(
        **of_records,
        max_staleness=math.inf if bound in (None, "unbounded") else float(bound),
        lags={int(lag): groups for lag, groups in status.get("lag", {}).get("histogram", {}).items()},
        wasted={reason: waste["tokens"] for reason, waste in status.get("waste", {}).items()},
        unused={name.removeprefix(UNUSED): n for name, n in status.get("counted", {}).items() if name.startswith(UNUSED)},
    )


def advice(run: RunShares) -> list[str]:
    """Three plain sentences; two where too few steps were trained to say who waits, and none before anything was."""
    if run.lags and run.steps < MIN_STEPS:
        return [f"Fewer than {MIN_STEPS} steps are trained, too few to say what each process waits for.", _on_waste(run)]
    return [_on_waiting(run), _on_staleness(run), _on_waste(run)] if run.lags else []


def _on_waiting(run: RunShares) -> str:
    waited, had = f"The trainer waited {run.trainer_idle:.0%} of the time", f"{run.workers} worker{'' if run.workers == 1 else 's'}"
    if run.trainer_idle >= BOTTLENECK_IDLE and run.longest_wait > ONE_WAIT:
        return f"{waited}, most of it for one batch: the trainer's log says what was missing then."
    if run.worker_idle is None:
        remedy = "help" if run.trainer_idle >= BOTTLENECK_IDLE else "gain nothing"
        return f"{waited}: more workers would {remedy} (how busy the present ones were is not on record here)."
    needed = max(1, math.ceil(run.workers * (1 - run.worker_idle) / max(0.01, 1 - run.trainer_idle)))
    if run.trainer_idle >= BOTTLENECK_IDLE > run.worker_idle:
        remedy = f"{max(1, needed - run.workers)} more like the present {had} would remove the wait"
    elif run.trainer_idle >= BOTTLENECK_IDLE:
        remedy = "they wait for each other; a larger broker.max_staleness lets them overlap more"
    elif needed < run.workers:
        remedy = f"{needed} of the {had} would do"
    else:
        remedy = (
            "both sides are busy"
            if run.worker_idle < BOTTLENECK_IDLE
            else "the trainer is the slower side, so more workers would gain nothing"
        )
    return f"{waited} and workers were idle for {run.worker_idle:.0%} of theirs: {remedy}."


def _on_staleness(run: RunShares) -> str:
    groups, largest, bound = sum(run.lags.values()), max(run.lags), run.max_staleness
    if largest < bound:
        limit = "without a bound" if math.isinf(bound) else f"below the bound of {bound:g}: a larger broker.max_staleness gains nothing"
        return f"No trained group was older than {largest} versions, {limit}."
    at_bound = sum(count for lag, count in run.lags.items() if lag >= bound) / groups
    share = f"{at_bound:.0%} of the trained groups were as old as the bound of {bound:g} allows"
    if at_bound < AT_BOUND or (run.worker_idle is not None and run.worker_idle < BOTTLENECK_IDLE):
        return f"{share}, and it held nobody back: a larger broker.max_staleness gains little."
    if run.trainer_idle < BOTTLENECK_IDLE:
        return f"{share}, and the trainer hardly waited: a larger broker.max_staleness would only make samples older."
    return f"{share}, and both sides waited: a larger broker.max_staleness would be faster, if it learns as well."


def _on_waste(run: RunShares) -> str:
    trained, wasted = sum(run.lags.values()), sum(run.wasted.values())
    shares = {reason: tokens / max(1.0, run.tokens + wasted) for reason, tokens in run.wasted.items()}
    shares |= {reason: groups / trained for reason, groups in run.unused.items()}
    worst = max(shares, key=lambda reason: shares[reason], default="")
    if not worst or shares[worst] < 0.01:
        if (all_of_it := wasted / max(1.0, run.tokens + wasted)) >= 0.01:
            return f"{all_of_it:.0%} of the sampled tokens were wasted, for {len(run.wasted)} reasons: the status lists them."
        return "Less than 1% of what was sampled was wasted."
    what = "trained groups gave no gradient" if worst in run.unused else "sampled tokens were wasted"
    remedy = next((text for part, text in REMEDIES.items() if part in worst), "the status lists the reasons")
    return f"{shares[worst]:.0%} of the {what} ({worst}): {remedy}."
