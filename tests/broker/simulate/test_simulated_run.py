"""Whole simulated runs: limits that can be worked out, the bound, and what is refused."""

import msgspec
import pytest

from broker.simulate.simulated_run import SimulationOutcome, simulate
from broker.simulate.workload import Workload, lognormal_lengths
from slimebus.bus.errors import ConfigError

SMALL = Workload(steps=50, batch=16, samples=4, groups_per_worker=16, lengths=lognormal_lengths(100, 0.6, 800), worker_tokens_per_s=3000.0)


def play(**changes: object) -> SimulationOutcome:
    return simulate(msgspec.structs.replace(SMALL, **changes))


def test_the_same_seed_gives_the_same_run() -> None:
    assert play(seed=3) == play(seed=3)
    assert play(seed=3).tokens_per_s != play(seed=4).tokens_per_s


def test_a_trainer_that_is_the_slower_side_sets_the_pace_and_never_waits() -> None:
    found = play(workers=8, max_staleness=2, step_s=1.0, publish_s=0.25)
    assert found.steps_per_s == pytest.approx(0.8, rel=1e-6)
    assert found.trainer_idle == 0.0
    assert found.lag_mean == pytest.approx(2.0, abs=0.01)


def test_workers_that_are_the_slower_side_sample_all_the_time() -> None:
    found = play(workers=1, max_staleness=8, step_s=0.1)
    assert found.steps_per_s == pytest.approx(3000 / (16 * 4 * SMALL.mean_length), rel=0.03)
    assert found.worker_idle < 0.01


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_no_token_is_older_than_the_bound(bound: int) -> None:
    found = play(workers=3, max_staleness=bound, step_s=0.5, pull_s=0.3)
    assert max(found.lag_tokens) <= bound
    assert found.tokens_per_s > 0


def test_on_policy_both_sides_wait_for_each_other() -> None:
    found = play(workers=1, max_staleness=0, step_s=1.0)
    assert found.lag_mean == 0.0
    assert found.trainer_idle > 0.5
    assert found.worker_idle > 0.1


def test_groups_that_grew_too_old_are_wasted_and_counted() -> None:
    found = play(workers=1, max_staleness=1, groups_per_worker=32, lengths=lognormal_lengths(100, 1.2, 3000))
    assert found.wasted_tokens > 0.05
    assert found.wasted_groups["stale"] > 10


def test_trainer_and_workers_on_one_core_take_turns() -> None:
    found = play(steps=100, workers=1, max_staleness=8, step_s=1.0, cores=1)
    sampling_s = 16 * 4 * SMALL.mean_length / 3000
    assert found.steps_per_s == pytest.approx(1 / (1.0 + sampling_s), rel=0.03)
    assert play(steps=100, workers=1, max_staleness=8, step_s=1.0, cores=2).steps_per_s == pytest.approx(1 / sampling_s, rel=0.03)


def test_on_policy_a_shared_machine_is_as_fast_as_two() -> None:
    assert play(max_staleness=0, cores=1).steps_per_s == pytest.approx(play(max_staleness=0).steps_per_s, rel=0.01)


def test_evaluations_take_the_time_of_workers_and_no_step() -> None:
    found = play(steps=100, workers=1, max_staleness=8, step_s=0.1, eval_interval=2, eval_samples=64)
    assert found.steps_per_s == pytest.approx(3000 / ((64 + 32) * SMALL.mean_length), rel=0.05)
    assert found.wasted_tokens < 0.05
    assert max(found.lag_tokens) <= 8


def test_ten_thousand_workers_are_played() -> None:
    found = play(steps=5, workers=10_000, batch=128, max_staleness=2, step_s=1.0)
    assert found.worker_idle > 0.9


def test_lengths_that_are_no_quantiles_are_refused() -> None:
    with pytest.raises(ConfigError, match="rising quantiles"):
        Workload(lengths=(5.0, 2.0))


def test_log_normal_lengths_have_their_mean_and_are_cut() -> None:
    lengths = lognormal_lengths(100, 0.5, 1e9)
    assert Workload(lengths=lengths).mean_length == pytest.approx(100, rel=0.02)
    assert max(lognormal_lengths(100, 1.0, 150)) == 150
