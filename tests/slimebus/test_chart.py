from pathlib import Path

import pytest

from slimebus.chart import Curve, draw_curve, running_mean, spread, title
from slimebus.errors import SlimebusError


def curve(steps: int = 12, bound: float = 2) -> Curve:
    return {
        "steps": [{"t": 0.5 * s, "step": s, "reward": 0.05 * s, "lag_mean": 1.5, "lag_max": 2} for s in range(1, steps + 1)],
        "evals": [
            {"t": 0.0, "step": 0, "accuracy": 0.43, "low": 0.39, "high": 0.47},
            {"t": 80.4, "step": steps, "accuracy": 0.953, "low": 0.93, "high": 0.97},
        ],
        "max_staleness": bound,
        "machine": "2 CPU cores",
    }


def test_title_says_the_result() -> None:
    assert title(curve()) == "0.43 → 0.95 held-out accuracy in 80 s of RL on 2 CPU cores"


def test_title_gives_the_time_that_the_result_gives() -> None:
    assert title({**curve(), "rl_s": 115.2}) == "0.43 → 0.95 held-out accuracy in 115 s of RL on 2 CPU cores"


@pytest.mark.parametrize("bound", [0, 2, float("inf")])
def test_picture_is_a_png_of_the_promised_size(tmp_path: Path, bound: float) -> None:
    path = tmp_path / "new" / "curve.png"
    draw_curve(curve(bound=bound), path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert (int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")) == (1650, 990)


def test_one_step_is_enough_to_draw(tmp_path: Path) -> None:
    draw_curve(curve(steps=1), tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 10_000


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    with pytest.raises(SlimebusError, match="0 steps and 2 evaluations"):
        draw_curve({**curve(), "steps": []}, tmp_path / "curve.png")


def test_running_mean_takes_the_neighbours_there_are() -> None:
    assert running_mean([0.0, 3.0, 6.0, 9.0], 3) == [1.5, 3.0, 6.0, 7.5]


def test_labels_that_would_overlap_move_apart_and_others_stay() -> None:
    assert spread((0.95, 0.5), 0.1) == [0.95, 0.5]
    assert spread((0.5, 0.5), 0.1) == pytest.approx([0.55, 0.45])
    assert spread((0.4, 0.46), 0.1) == pytest.approx([0.38, 0.48])
