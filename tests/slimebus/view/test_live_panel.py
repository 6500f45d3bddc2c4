from typing import Any

import pytest
from rich.console import Console

from slimebus.view import live_panel
from slimebus.view.live_panel import LivePanel, sparkline, time_left

STEP = {"reward": 0.625, "lag_mean": 1.98, "lag_max": 2, "num_tokens": 13_876, "train_s": 0.75, "wait_s": 0.25, "elapsed_s": 10.0}


def status(**changes: Any) -> dict[str, Any]:
    """What the broker says of a run whose worker has made 141,000 tokens."""
    return {
        "step": 60,
        "num_steps": 120,
        "settings": {"max_staleness": 2.0},
        "pace": {"step_s": 0.5},
        "steps": [{"step": 58, "metrics": {**STEP, "reward": 0.25}}, {"step": 59, "metrics": STEP}],
        "evaluations": [
            {"dataset": "held", "done": True, "version": version, "mean_reward": score} for version, score in ((0, 0.43), (50, 0.912))
        ],
        "clients": [{"role": "rollout", "state": "serving", "metrics": {"tokens": 141_000.0}}, {"role": "trainer", "state": "training"}],
        "groups": {"queued": 0, "leased": 32, "ready": 12, "assigned": 31},
        "waiting": ["trainer waits for a batch: 12 of 32 groups are ready"],
        **changes,
    }


@pytest.fixture
def panel(monkeypatch: pytest.MonkeyPatch) -> LivePanel:
    """Ten seconds old at its first look."""
    now = [0.0]
    monkeypatch.setattr(live_panel.time, "monotonic", lambda: now[0])
    made = LivePanel("RL")
    now[0] = 10.0
    return made


def screen(panel: LivePanel, shown: dict[str, Any]) -> list[str]:
    panel.take(shown)
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(panel.render())
    return capture.get().splitlines()


def test_screen_shows_every_part_of_the_status(panel: LivePanel) -> None:
    text = "\n".join(screen(panel, status()))
    for part in (
        "60/120",
        "10 s, 30 s left",
        "▁█",
        "0.625",
        "0.912 (0.430 before)",
        "mean 1.98, largest 2, bound 2",
        "trainer 13.9 k",
        "1 worker 14.1 k",
        "0 queued, 32 leased, 12 ready, 31 assigned",
        "trainer waits for a batch: 12 of 32 groups are ready",
    ):
        assert part in text


def test_screen_keeps_its_height_whatever_happens(panel: LivePanel) -> None:
    early = screen(panel, status(step=0, steps=[], evaluations=[], waiting=[]))
    many = [{"step": step, "metrics": STEP} for step in range(500)]
    crowded = screen(panel, status(steps=many, waiting=["worker w0 waits for a version " * 5] * 5))
    assert len(early) == len(screen(panel, status())) == len(crowded) == 9


def test_a_reason_in_brackets_is_shown_as_it_is(panel: LivePanel) -> None:
    assert any("waits for [w0]" in row for row in screen(panel, status(waiting=["waits for [w0]"])))


def test_line_is_one_plain_line(panel: LivePanel) -> None:
    panel.take(status())
    assert panel.line() == (
        "RL step 60/120  10 s, 30 s left | reward 0.625 | held-out 0.912 (0.430 before) | lag mean 1.98, largest 2, bound 2"
        " | tokens/s trainer 13.9 k, 1 worker 14.1 k | trainer waits for a batch: 12 of 32 groups are ready"
    )


def test_what_is_not_known_yet_is_not_shown_as_a_number(panel: LivePanel) -> None:
    panel.take(status(step=0, steps=[], evaluations=[{"dataset": "held", "done": False, "version": 0, "mean_reward": None}]))
    assert "held-out not measured |" in panel.line()
    assert "reward none yet" in panel.line()


def test_sparkline_spans_the_values_it_shows() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([9.0, 0.0, 1.0], width=2) == "▁█"
    assert sparkline([0.3, 0.3]) == "▄▄"
    assert sparkline([]) == ""


def test_time_left_follows_the_pace_of_the_last_steps() -> None:
    assert time_left(38, 60, 0.5) == "38 s, 30 s left"
    assert time_left(38, 60, 0.0) == "38 s"
    assert time_left(38, 0, 0.5) == "38 s"


def test_an_unbounded_staleness_is_named(panel: LivePanel) -> None:
    panel.take(status(settings={"max_staleness": "unbounded"}))
    assert "bound unbounded" in panel.line()


def test_a_single_look_shows_the_mean_pace_of_workers() -> None:
    single = LivePanel("RL")
    single.take(status(clients=[{"role": "rollout", "state": "serving", "metrics": {"tokens": 5000.0, "serving_s": 10.0}}]))
    assert "1 worker 500" in single.line()


def test_labels_stay_whole_beside_a_long_wait(panel: LivePanel) -> None:
    long = "worker-1 waits for a lease: " + "a group started now would train too late " * 5
    lines = "\n".join(screen(panel, status(waiting=[long])))
    assert all(label in lines for label in ("reward", "held-out", "tokens/s", "groups", "waiting"))
