"""Samples of an engine share its speed; times worked by hand."""

import random

import pytest

from broker.simulate.engine import SimulatedEngine, SimulatedGroup
from broker.simulate.workload import Workload


def engine(*lengths: float, **changes: float) -> SimulatedEngine:
    """100 tokens/s in all; samples have these lengths, one after the other."""
    workload = Workload(worker_tokens_per_s=100.0, **changes)  # type: ignore[arg-type]
    made = SimulatedEngine(workload, random.Random(0))
    following = iter(lengths)
    object.__setattr__(made, "workload", _Fixed(workload, following))
    return made


class _Fixed:
    """A workload whose lengths are given."""

    def __init__(self, workload: Workload, lengths: object) -> None:
        self._workload, self._lengths = workload, lengths

    def length(self, rng: random.Random) -> float:
        return next(self._lengths)  # type: ignore[call-overload, no-any-return]

    def speed(self, running: int) -> float:
        return self._workload.speed(running)


def test_two_samples_share_the_engine_until_the_shorter_is_done() -> None:
    made, group = engine(50.0, 100.0), SimulatedGroup("g", 1, 2)
    made.begin(group, 0, 0.0)
    assert made.next_at() == pytest.approx(1.0)  # 50 tokens at 50 tokens/s each
    assert made.finish_next(1.0) is None
    assert made.next_at() == pytest.approx(1.5)  # 50 tokens left at 100 tokens/s
    assert made.finish_next(1.5) is group
    assert group.tokens == pytest.approx(150.0)
    assert (made.made, made.next_at()) == (pytest.approx(150.0), float("inf"))


def test_a_sample_alone_is_no_faster_than_its_own_tokens_allow() -> None:
    made = engine(50.0, token_s=0.02)
    made.begin(SimulatedGroup("g", 1, 1), 0, 0.0)
    assert made.next_at() == pytest.approx(1.0)


def test_tokens_are_of_the_version_that_was_served_when_they_were_made() -> None:
    made, group = engine(100.0), SimulatedGroup("g", 1, 1)
    made.begin(group, 3, 0.0)
    made.take_version(4, 0.25)
    made.take_version(5, 0.75)
    assert made.finish_next(1.0) is group
    assert group.runs == {3: pytest.approx(25.0), 4: pytest.approx(50.0), 5: pytest.approx(25.0)}


def test_versions_taken_up_while_it_was_idle_make_no_tokens() -> None:
    made, group = engine(10.0), SimulatedGroup("g", 1, 1)
    made.take_version(0, 0.0)
    made.begin(group, 7, 5.0)
    made.finish_next(5.1)
    assert list(group.runs) == [7]


def test_no_token_is_made_while_a_version_is_loaded() -> None:
    made, group = engine(100.0), SimulatedGroup("g", 1, 1)
    made.begin(group, 3, 0.0)
    made.take_version(4, 0.5, load_s=0.2)
    assert made.next_at() == pytest.approx(1.2)
    assert made.finish_next(1.2) is group
    assert group.runs == {3: pytest.approx(50.0), 4: pytest.approx(50.0)}
