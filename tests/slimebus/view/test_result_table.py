from rich.console import Console

from slimebus.view.report import Result, result_table, table_rows


def result() -> Result:
    return {
        "accuracy_before": 0.43,
        "accuracy_after": 0.953,
        "heldout_problems": 512,
        "steps": 120,
        "total_s": 214.0,
        "rl_s": 80.3,
        "lag_mean": 1.97,
        "lag_max": 2,
        "max_staleness": 2,
        "dropped": {"too_stale": 3, "zero_variance": 512},
        "delta_fraction": 0.131,
        "trainer_idle": 0.03,
        "worker_idle": 0.44,
        "seed": 0,
    }


def printed(values: object) -> str:
    console = Console(width=110, color_system=None)
    with console.capture() as capture:
        console.print(values)
    return capture.get()


def test_table_gives_each_figure_once() -> None:
    text = printed(result_table(result()))
    for part in (
        "0.430 (0.388–0.473) → 0.953 (0.931–0.968) on 512 problems",
        "80 s of RL, 214 s in all",
        "mean 1.97, largest 2, bound 2 versions",
        "512 groups with equal rewards, 3 too stale",
        "13.1% of the model",
    ):
        assert text.count(part) == 1


def test_no_drops_are_said() -> None:
    assert table_rows({**result(), "dropped": {}})["trained nothing"] == "none"


def test_what_was_not_measured_has_no_row() -> None:
    names = table_rows({key: value for key, value in result().items() if key != "worker_idle"})
    assert "workers idle" not in names
    assert "trainer idle" in names


def test_a_reward_outside_of_0_to_1_has_no_interval() -> None:
    assert table_rows({"accuracy_before": -0.5, "accuracy_after": 2.0, "heldout_problems": 8})["held-out reward"] == (
        "-0.500 → [bold green]2.000[/] on 8 problems"
    )
