import itertools

import msgspec
import pytest

from slimebus.telemetry.scores import Scores, of_attempts, pass_at, wilson


@pytest.mark.parametrize(("n", "num_right"), [(5, 0), (5, 1), (5, 2), (5, 5), (1, 1)])
def test_pass_at_k_is_the_share_of_choices_with_a_right_one(n: int, num_right: int) -> None:
    samples = [1] * num_right + [0] * (n - num_right)
    for k in range(1, n + 1):
        chosen = list(itertools.combinations(samples, k))
        assert pass_at(k, n, num_right) == pytest.approx(sum(map(any, chosen)) / len(chosen))


def test_scores_of_two_prompts() -> None:
    scores = Scores()
    scores.add([1.0, 0.0, 0.0], 1)
    scores.add([1.0, 1.0, 1.0, 1.0], 0)
    row = scores.row()
    assert (row["num_done"], row["num_samples"], row["num_failed"], row["interval"]) == (2, 7, 1, "wilson")
    assert row["mean_reward"] == pytest.approx(5 / 7)
    assert {k: mean for k, (mean, _, _) in row["pass_at"].items()} == pytest.approx({"1": 0.625, "2": 0.75, "4": 1.0})
    assert all(low < mean <= high for mean, low, high in row["pass_at"].values())
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(scores), type=Scores) == scores


def test_rewards_of_other_values_have_a_normal_interval_and_pass_from_1_on() -> None:
    scores = Scores()
    for reward in (0.9, 1.0, 2.0, -1.0):
        scores.add([reward], 0)
    row = scores.row()
    assert (row["interval"], row["pass_at"]["1"][0]) == ("normal", 0.5)
    assert row["high"] - row["mean_reward"] == pytest.approx(1.959964 * (4.7075 / 3 / 4) ** 0.5, rel=1e-3)


def test_nothing_was_scored() -> None:
    scores = Scores()
    scores.add([], 2)
    assert (scores.row()["mean_reward"], scores.row()["pass_at"]["1"][0]) == (None, 0.0)


def test_branches_of_one_attempt_count_once_with_their_mean() -> None:
    attempts, rewards = [0, 0, 1, 1, 2], [1.0, 0.0, None, 1.0, None]
    assert of_attempts(attempts, rewards) == ([0.5, 1.0], 1)
    scores = Scores()
    scores.add(*of_attempts(attempts, rewards))
    assert (scores.num_samples, scores.num_failed, sorted(scores.passed)) == (2, 1, [1, 2])


def test_interval_agrees_with_the_formula_worked_by_hand() -> None:
    """n = 100, p = 0.9, z = 2: centre (0.9 + 0.02) / 1.04, half width 2 / 1.04 * sqrt(0.0009 + 0.0001)."""
    low, high = wilson(0.9, 100, z=2.0)
    assert low == pytest.approx(0.92 / 1.04 - 2 / 1.04 * 0.001**0.5)
    assert high == pytest.approx(0.92 / 1.04 + 2 / 1.04 * 0.001**0.5)


@pytest.mark.parametrize("accuracy", [0.0, 0.5, 1.0])
def test_interval_stays_in_range_and_holds_the_accuracy(accuracy: float) -> None:
    low, high = wilson(accuracy, 20)
    assert 0 <= low <= accuracy + 1e-12
    assert accuracy - 1e-12 <= high <= 1
    assert high - low > 0.1


def test_nothing_measured_says_nothing() -> None:
    assert wilson(0.0, 0) == (0.0, 1.0)
