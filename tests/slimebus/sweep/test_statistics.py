import pytest

from slimebus.sweep.results import Point, RunResult, conclusion, detectable, estimate, p_worse, score_of, speed_of

ETA = "broker.max_staleness"


def run(label: str, seed: int, score: float, speed: float = 100.0, *, axis: str = ETA, state: str = "done") -> RunResult:
    point = Point(steps=10, seconds=5.0, samples=80.0, score=score, low=score - 0.02, high=score + 0.02)
    return RunResult(name=f"{label}-{seed}", condition={axis: label}, seed=seed, state=state, points=[point], samples_per_s=speed, steps=10)


def runs(scores: dict[str, list[float]], speeds: dict[str, float] | None = None, axis: str = ETA) -> list[RunResult]:
    return [run(label, seed, s, (speeds or {}).get(label, 100.0), axis=axis) for label, of in scores.items() for seed, s in enumerate(of)]


GOOD, SAME, BAD = [0.95, 0.96, 0.97], [0.955, 0.95, 0.965], [0.80, 0.82, 0.79]


def test_an_interval_is_students() -> None:
    found = estimate([0.9, 0.92, 0.94])  # deviation 0.02, t(2) = 4.3027
    assert found.interval == (
        pytest.approx(0.92 - 4.3027 * 0.02 / 3**0.5, abs=1e-5),
        pytest.approx(0.92 + 4.3027 * 0.02 / 3**0.5, abs=1e-5),
    )
    assert estimate([0.5]).interval is None
    assert estimate([0.5]).text() == "0.500"


def test_an_interval_ends_where_the_quantity_does() -> None:
    wide = [run("0", seed, score, speed) for seed, (score, speed) in enumerate([(0.0, 1.0), (0.9, 300.0)])]
    assert speed_of(wide).interval == (0.0, pytest.approx(150.5 + 12.706 * 149.5, rel=1e-3))  # t(1) = 12.706
    assert score_of(wide).interval == (pytest.approx(0.45 - 12.706 * 0.45, rel=1e-3), pytest.approx(0.45 + 12.706 * 0.45, rel=1e-3))
    for one in wide:
        one.points[-1].is_rate = True
    assert score_of(wide).interval == (0.0, 1.0), "of rewards that are 0 or 1"


def test_the_test_is_welchs_and_one_sided() -> None:
    # t = -0.01 / sqrt(0.0001/3 + 0.0004/3) = -0.7746, 2.94 degrees of freedom
    assert p_worse([0.93, 0.95, 0.97], [0.95, 0.96, 0.97]) == pytest.approx(0.2484, abs=2e-3)
    assert p_worse([0.95, 0.96, 0.97], [0.93, 0.95, 0.97]) == pytest.approx(1 - 0.2484, abs=2e-3)
    assert p_worse([0.5, 0.5], [0.6, 0.6]) == 0.0
    assert p_worse([0.6, 0.6], [0.6, 0.6]) == 1.0


def test_a_larger_spread_hides_larger_falls() -> None:
    assert detectable([0.9, 0.92, 0.94], [0.9, 0.92, 0.94]) == pytest.approx(2 * detectable([0.91, 0.92, 0.93], [0.91, 0.92, 0.93]))


NEAR = "within 1% of the fastest, or not told apart from it"
CLIP = {"clip": GOOD, "tis": SAME, "none": BAD}


@pytest.mark.parametrize(
    ("scores", "speeds", "begins", "ends"),
    [
        (
            {"0": GOOD, "1": SAME, "2": SAME, "16": BAD},
            {"0": 50.0, "1": 90.0, "2": 99.5, "16": 100.0},
            f"eta = 2 is the smallest {NEAR}, that does not learn worse than eta = 0 (p = 0.34, 3 seeds; a fall of 0.0",
            "",
        ),
        (
            {"0": GOOD, "2": SAME, "16": BAD},
            {"0": 50.0, "2": 80.0, "16": 100.0},
            f"Every eta {NEAR}, learns worse than eta = 0 (eta = 16: p < 0.001); ",
            "of those that do not, eta = 2 is the fastest (80% of the samples/s of 16).",
        ),
        ({"0": GOOD, "4": SAME}, {}, f"eta = 0, the smallest, is {NEAR} (eta = 0).", ""),
        (
            {"inf": SAME, "16": SAME, "2": GOOD},
            {"inf": 100.0, "16": 99.9, "2": 10.0},
            f"eta = 16 is the smallest {NEAR}, that does not learn worse than eta = 2",
            "",
        ),
        ({"0": GOOD[:2], "2": SAME}, {}, "Too few seeds to say which eta learns better (2; at least 3)", ""),
        (CLIP, {}, "clip ends highest (0.960 (0.935–0.985), 3 seeds); not told apart from it: tis; worse: none (p < 0.001)", ""),
    ],
)
def test_the_conclusion_names_the_smallest_value_that_costs_neither_speed_nor_learning(
    scores: dict[str, list[float]], speeds: dict[str, float], begins: str, ends: str
) -> None:
    """Values are ordered as numbers, infinity is one; what has no numbers is compared with the best."""
    axis = "method" if scores is CLIP else ETA
    said = conclusion(runs(scores, speeds, axis), axis)
    assert said.startswith(begins)
    assert said.endswith(ends)
    assert not begins.startswith("Too few") or " p = " not in said


def test_trials_without_a_score_are_named_and_do_not_count() -> None:
    trials = runs({"0": GOOD, "2": SAME}, {"0": 10.0}) + [run("4", seed, 0.1, 500.0, state="failed") for seed in range(3)]
    said = conclusion(trials, ETA)
    assert said.startswith("eta = 2 is the smallest")
    assert said.endswith("Without a score: 4 (failed).")
    assert conclusion(trials[:1], ETA) == "Nothing to compare: 1 value of eta with a score."


def test_a_value_is_slower_only_where_its_seeds_show_it() -> None:
    noisy = {"0": [271.0, 90.0, 450.0], "2": [364.0, 360.0, 368.0], "8": [334.0, 200.0, 480.0]}
    found = [run(label, seed, SAME[seed], speed) for label, of in noisy.items() for seed, speed in enumerate(of)]
    assert conclusion(found, ETA).startswith("eta = 0, the smallest, is within 1% of the fastest, or not told apart from it (eta = 2)")


def test_repeats_of_one_seed_are_one_sample() -> None:
    twice = [run(label, seed, score) for label in ("0", "2") for seed, score in [(0, 0.9), (0, 0.8), (1, 0.7)]]
    assert "Too few seeds" in conclusion(twice, ETA)
    assert score_of(twice[:3]).mean == pytest.approx((0.85 + 0.7) / 2)
    assert score_of(twice[:2]).interval is None
