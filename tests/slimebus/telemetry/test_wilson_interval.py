import pytest

from slimebus.telemetry.wilson_interval import wilson


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
