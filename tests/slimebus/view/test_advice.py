"""The three sentences: which side waits, what the bound does, what is wasted."""

import math
from typing import Any

import pytest

from slimebus.view.advice import RunShares, advice, shares_of


def run(**changes: Any) -> RunShares:
    usual: dict[str, Any] = {"steps": 10, "trainer_idle": 0.0, "worker_idle": 0.0, "workers": 3, "tokens": 1000.0, "max_staleness": 2.0}
    return RunShares(**(usual | {"lags": {0: 10}, "wasted": {}, "unused": {}} | changes))


def waiting(trainer_idle: float, worker_idle: float | None, workers: int) -> dict[str, Any]:
    return {"trainer_idle": trainer_idle, "worker_idle": worker_idle, "workers": workers}


WAITED, BOUND, WASTED = range(3)
MOST = "the trainer's log says what was missing then."


@pytest.mark.parametrize(
    ("changes", "sentence", "said"),
    [
        (waiting(0.38, 0.0, 3), WAITED, "2 more like the present 3 workers would remove the wait"),  # 3 / 0.62 = 4.8
        (waiting(0.1, 0.0, 1), WAITED, "1 more like the present 1 worker would remove the wait"),
        (waiting(0.5, 0.04, 4), WAITED, "4 more like the present 4 workers"),
        (waiting(0.2, 0.3, 3), WAITED, "they wait for each other; a larger broker.max_staleness lets them overlap more"),
        (waiting(0.0, 0.5, 4), WAITED, "2 of the 4 workers would do"),
        (waiting(0.0, 0.2, 2), WAITED, "the trainer is the slower side"),
        (waiting(0.01, 0.01, 3), WAITED, "both sides are busy"),
        (waiting(0.2, None, 3), WAITED, "more workers would help"),
        (waiting(0.01, None, 3), WAITED, "more workers would gain nothing"),
        ({"trainer_idle": 0.9, "longest_wait": 0.7}, WAITED, f"The trainer waited 90% of the time, most of it for one batch: {MOST}"),
        ({"trainer_idle": 0.9, "longest_wait": 0.3}, WAITED, "more like"),
        ({"trainer_idle": 0.01, "longest_wait": 0.7}, WAITED, "both sides are busy"),
        (
            {"lags": {0: 5, 1: 5}},
            BOUND,
            "No trained group was older than 1 versions, below the bound of 2: a larger broker.max_staleness gains",
        ),
        ({"lags": {0: 5, 7: 5}, "max_staleness": math.inf}, BOUND, "No trained group was older than 7 versions, without a bound."),
        (
            {"lags": {0: 9, 2: 1}, "worker_idle": 0.5},
            BOUND,
            "10% of the trained groups were as old as the bound of 2 allows, and it held nobody",
        ),
        (
            {"lags": {2: 1}, "worker_idle": 0.5},
            BOUND,
            "the trainer hardly waited: a larger broker.max_staleness would only make samples older",
        ),
        (
            {"lags": {2: 1}, "worker_idle": 0.5, "trainer_idle": 0.5},
            BOUND,
            "both sides waited: a larger broker.max_staleness would be faster",
        ),
        ({}, WASTED, "Less than 1% of what was sampled was wasted."),
        (
            {"wasted": {"stale": 250, "given back": 10}, "unused": {"zero_variance": 1}},
            WASTED,
            "20% of the sampled tokens were wasted (stale): a larger broker.max_staleness",
        ),
        (
            {"wasted": {"stale": 10}, "unused": {"zero_variance": 4}},
            WASTED,
            "40% of the trained groups gave no gradient (zero_variance): prompts",
        ),
        (
            {"wasted": {f"returned: {i}": 8 for i in range(20)}},
            WASTED,
            "14% of the sampled tokens were wasted, for 20 reasons: the status lists them.",
        ),
    ],
)
def test_each_sentence_says_what_was_and_what_would_help(changes: dict[str, Any], sentence: int, said: str) -> None:
    found = advice(run(**changes))
    assert len(found) == 3
    assert said in found[sentence]
    assert found[WAITED].startswith(f"The trainer waited {run(**changes).trainer_idle:.0%} of the time")


def test_a_run_too_short_to_say_who_waits_says_so() -> None:
    short = advice(run(steps=9, worker_idle=1.0, lags={2: 1}))
    assert short == [
        "Fewer than 10 steps are trained, too few to say what each process waits for.",
        "Less than 1% of what was sampled was wasted.",
    ]


def test_a_run_that_trained_nothing_gets_none() -> None:
    assert advice(shares_of({}, steps=20, trainer_idle=0.0, worker_idle=None, workers=0, tokens=0.0)) == []


def test_a_status_is_read() -> None:
    status = {
        "settings": {"max_staleness": 4.0},
        "lag": {"histogram": {"0": 3, "4": 1}},
        "waste": {"stale": {"groups": 1, "tokens": 7}},
        "counted": {"unused: zero_variance": 2, "samples put": 9},
    }
    found = shares_of(status, steps=20, trainer_idle=0.1, worker_idle=0.2, workers=2, tokens=5.0)
    assert (found.lags, found.wasted, found.unused) == ({0: 3, 4: 1}, {"stale": 7}, {"zero_variance": 2})
    for word in (None, "unbounded"):
        unbounded = shares_of({"settings": {"max_staleness": word}}, steps=20, trainer_idle=0.1, worker_idle=None, workers=2, tokens=5.0)
        assert unbounded.max_staleness == math.inf
