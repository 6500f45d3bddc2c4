from pathlib import Path
from typing import Any

import pytest
from recipe import load

from slimebus.bus.errors import SlimebusError
from slimebus.view.report import RunReport

chart = load("quickstart/chart.py")

EVALS = [
    {"dataset": "held", "time": 100.0, "mean_reward": 0.43, "low": 0.39, "high": 0.47, "num_samples": 512},
    {"dataset": "held", "time": 180.4, "mean_reward": 0.953, "low": 0.93, "high": 0.97, "num_samples": 512},
]


def run(steps: int = 12) -> RunReport:
    rows: list[dict[str, Any]] = [
        {"time": 100 + 0.5 * s, "elapsed_s": 0.5 * s, "step": s - 1, "reward": 0.05 * s, "lag_mean": 1.5, "lag_max": 2}
        for s in range(1, steps + 1)
    ]
    return RunReport(steps=rows, evals=EVALS, workers=[], status={})


def draw(report: RunReport, path: Path, bound: float = 2) -> None:
    chart.draw_curve(report, path, dataset="held", max_staleness=bound, rl_s=80.4, machine="2 CPU cores")


def test_title_says_the_result() -> None:
    assert chart.title(EVALS, 80.4, "2 CPU cores") == "0.43 → 0.95 held-out accuracy in 80 s of RL on 2 CPU cores"
    assert chart.title(EVALS, 115.2) == "0.43 → 0.95 held-out accuracy in 115 s of RL"


@pytest.mark.parametrize("bound", [0, 2, float("inf")])
def test_picture_is_a_png_of_the_promised_size(tmp_path: Path, bound: float) -> None:
    path = tmp_path / "new" / "curve.png"
    draw(run(), path, bound)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert (int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")) == (1650, 990)


def test_one_step_is_enough_to_draw(tmp_path: Path) -> None:
    draw(run(steps=1), tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 10_000


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    with pytest.raises(SlimebusError, match="0 steps and 2 evaluations"):
        draw(run(steps=0), tmp_path / "curve.png")


def test_running_mean_takes_the_neighbours_there_are() -> None:
    assert chart.running_mean([0.0, 3.0, 6.0, 9.0], 3) == [1.5, 3.0, 6.0, 7.5]


def test_labels_that_would_overlap_move_apart_and_others_stay() -> None:
    assert chart.spread(0.95, 0.5, 0.1, 0.05) == (0.95, 0.5)
    assert chart.spread(0.5, 0.5, 0.1, 0.05) == pytest.approx((0.55, 0.45))
    assert chart.spread(0.4, 0.46, 0.1, 0.05) == pytest.approx((0.38, 0.48))
    assert chart.spread(0.0, 0.01, 0.1, 0.05) == pytest.approx((0.05, 0.15)), "not into what stands below"
