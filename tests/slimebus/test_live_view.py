from rich.console import Console

from slimebus.live_view import LiveStatus, line, render, sparkline, time_left


def status() -> LiveStatus:
    return {
        "phase": "RL",
        "step": 60,
        "num_steps": 120,
        "seconds": 38.0,
        "signal": "reward",
        "rewards": [0.25, 0.5, 0.625],
        "accuracy": 0.912,
        "accuracy_before": 0.43,
        "lag_mean": 1.98,
        "lag_max": 2,
        "max_staleness": 2,
        "trainer_tokens_per_s": 13_876,
        "workers_tokens_per_s": 14_100,
        "workers": 1,
        "queued": 0,
        "leased": 32,
        "ready": 12,
        "assigned": 31,
        "waits": ["trainer waits for a batch: 12 of 32 groups are ready"],
    }


def screen(shown: LiveStatus) -> list[str]:
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(render(shown))
    return capture.get().splitlines()


def test_screen_shows_every_part_of_the_status() -> None:
    text = "\n".join(screen(status()))
    for part in (
        "60/120",
        "38 s left",
        "0.625",
        "0.912 (0.430 before)",
        "mean 1.98, largest 2, bound 2",
        "trainer 13.9 k",
        "1 worker 14.1 k",
    ):
        assert part in text
    assert "0 queued, 32 leased, 12 ready, 31 assigned" in text
    assert "trainer waits for a batch: 12 of 32 groups are ready" in text


def test_screen_keeps_its_height_whatever_happens() -> None:
    early: LiveStatus = {**status(), "step": 0, "rewards": [], "accuracy": None, "accuracy_before": None, "waits": []}
    crowded: LiveStatus = {**status(), "rewards": [0.1] * 500, "waits": ["worker w0 waits for a version " * 5] * 5}
    assert len(screen(early)) == len(screen(status())) == len(screen(crowded)) == 9


def test_a_reason_in_brackets_is_shown_as_it_is() -> None:
    assert any("waits for [w0]" in row for row in screen({**status(), "waits": ["waits for [w0]"]}))


def test_line_is_one_plain_line() -> None:
    assert line(status()).startswith("RL step 60/120 | reward 0.625 | accuracy 0.912 (0.430 before) | lag mean 1.98")
    assert "\n" not in line(status())


def test_unmeasured_accuracy_is_not_shown_as_a_number() -> None:
    assert "accuracy not measured yet" in line({**status(), "accuracy": None})


def test_sparkline_spans_the_values_it_shows() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([9.0, 0.0, 1.0], width=2) == "▁█"
    assert sparkline([0.3, 0.3]) == "▄▄"
    assert sparkline([]) == ""


def test_time_left_follows_the_pace_so_far() -> None:
    assert time_left(status()) == "38 s, 38 s left"
    assert time_left({**status(), "step": 0}) == "38 s"
    assert time_left({**status(), "step": 120}) == "38 s"


def test_labels_stay_whole_beside_a_long_wait() -> None:
    shown = status()
    shown["waits"] = ["worker-1 waits for a lease: " + "a group started now would train too late " * 5]
    lines = "\n".join(screen(shown))
    assert all(label in lines for label in ("reward", "accuracy", "tokens/s", "groups", "waiting"))
