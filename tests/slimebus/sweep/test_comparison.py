import base64
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from click.testing import CliRunner
from run_records import write_run

from slimebus.cli.commands.sweep import compare
from slimebus.sweep import plots
from slimebus.sweep.comparison import main_axis, render_page, result_rows, sections_of
from slimebus.sweep.results import Estimate, Point, RunResult

ETA = "broker.max_staleness"


def result(eta: int, how: str, seed: int, **more: object) -> RunResult:
    points = [
        Point(steps=s, seconds=s * (2.0 - eta / 10), samples=s * 8.0, score=0.4 + s / 30 - eta / 100, low=0.1, high=0.9) for s in (0, 10)
    ]
    usual = {
        "points": points,
        "samples_per_s": 100.0 + eta,
        "steps": 10,
        "seconds": 20.0,
        "means": {"m2": 0.01, "ess_token": 0.9},
        "score_name": "heldout",
    }
    lag = {"1": {"m2": 0.1, "log_ratio_p95": 0.2, "loss": 0.3}, "5-8": {"m2": 0.4, "log_ratio_p95": 0.3, "mismatch": 0.01}}
    own = {"name": f"{eta},{how},{seed}", "condition": {ETA: str(eta), "how": how}, "seed": seed, "by_lag": lag}
    return RunResult(**(usual | own | more))  # type: ignore[arg-type]


RESULTS = [result(eta, how, seed) for how in ("clip", "tis") for eta in (0, 2) for seed in (0, 1, 2)]
FAILED = result(4, "clip", 0, state="failed", reason="it broke: <script>alert(1)</script> | no", points=[], steps=0)


def texts(svg: str) -> set[str]:
    """What a drawing says."""
    return {"".join(text.itertext()).strip() for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")}


def test_a_section_is_what_the_other_axes_have_in_common() -> None:
    assert main_axis(RESULTS) == ETA
    assert main_axis(RESULTS, "how") == "how"
    assert list(sections_of(RESULTS, ETA)) == ["clip", "tis"]
    assert list(sections_of(RESULTS, "how")) == ["eta 0", "eta 2"]


def test_a_condition_is_a_row_with_its_interval() -> None:
    (row, *_) = result_rows(sections_of(RESULTS, ETA)["clip"], ETA)
    assert row == ("0", "3 of 3", "0.733 (0.733–0.733)", "10", "20 s", "100 (100–100)", "0.00", "0.9", "", "0.01", "")
    (one,) = result_rows(RESULTS[:1], ETA)
    assert one[2] == "0.733 [0.100–0.900]", "of one seed: the interval of the problems"


def test_a_failed_trial_is_a_row_with_its_reason() -> None:
    (row,) = result_rows([FAILED], ETA)
    assert row[:2] == ("4", "0 of 1")
    assert row[-1] == "seed 0 failed: it broke: <script>alert(1)</script> | no"


@pytest.mark.filterwarnings("error")
def test_error_bars_end_where_their_intervals_do() -> None:
    assert plots._bars([Estimate(1.0, (0.0, 4.0), 2), Estimate(2.0, None, 1)]) == ([1.0, 2.0], [[1.0, 0.0], [3.0, 0.0]])


def test_what_is_nowhere_above_zero_is_drawn_without_a_warning() -> None:
    assert plots.plot_by_lag([result(2, "clip", 0, by_lag={"0": {"m2": 0.0}})], ETA)


def test_every_plot_shows_its_runs() -> None:
    clip = sections_of(RESULTS, ETA)["clip"]
    assert {"heldout", "seconds of steps", "steps", "samples trained", "0", "2"} <= texts(plots.plot_learning(clip, ETA))
    by_lag = texts(plots.plot_by_lag(clip, ETA))
    assert {"loss, by the step's mean lag", "second moment of the log ratio", "engine's own mismatch, mean", "5-8"} <= by_lag
    assert {"eta", "samples/s, once warm", "last score", "clip", "tis", "eta 0", "eta 2"} <= texts(
        plots.plot_trade_off(sections_of(RESULTS, ETA), ETA)
    )
    assert "clip" in texts(plots.plot_trade_off(sections_of(RESULTS, "how"), "how"))
    unbounded = result(2, "clip", 0, condition={ETA: "inf"})
    assert "inf" in texts(plots.plot_trade_off({"": [unbounded, result(2, "clip", 0, condition={ETA: "2"})]}, ETA))


def test_the_report_is_one_file_and_hostile_text_stays_text() -> None:
    html = render_page([*RESULTS, FAILED], ETA, "Sweep <b>", "run: x\n$HOME")
    assert html.count("data:image/svg+xml;base64,") == 5
    assert "<script" not in html
    assert "Sweep &lt;b&gt;" in html
    assert "$HOME" in html
    assert not re.search(r"(?:src|href)=\"(?!data:)", html)
    assert "Without a score: 4 (failed)" in html


def test_one_condition_has_a_report_without_a_comparison() -> None:
    alone = [result(0, "", seed, condition={}) for seed in (0, 1)]
    assert main_axis(alone) == ""
    assert render_page(alone, "", "Sweep", "").count("data:image/svg+xml") == 2
    assert result_rows(alone, "")[0][:2] == ("all", "2 of 2")


def test_plots_are_the_same_for_the_same_results() -> None:
    assert plots.plot_learning(RESULTS[:6], ETA) == plots.plot_learning(RESULTS[:6], ETA)


def test_compare_writes_report_table_and_numbers(tmp_path: Path) -> None:
    for eta in (0, 2):
        write_run(tmp_path / f"eta{eta}", eta=eta)
    done = CliRunner().invoke(compare, [str(tmp_path / "eta0"), str(tmp_path / "eta2"), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "Too few seeds to say which eta learns better (1; at least 3)" in done.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["report.html", "results.json"]
    assert [r["condition"] for r in json.loads((tmp_path / "out" / "results.json").read_text())] == [{ETA: "0"}, {ETA: "2"}]
    assert "--axis" not in done.stderr
    done = CliRunner().invoke(compare, [str(tmp_path / "eta0"), str(tmp_path / "eta2"), "--axis", "optimizer.lr"])
    assert done.exit_code == 0, done.output
    assert done.stderr == f"--axis optimizer.lr: no two of these runs differ in it alone; compared by {ETA}\n"
    images = re.findall(r"base64,([^\"]+)", (tmp_path / "out" / "report.html").read_text())
    assert all(base64.b64decode(image).startswith(b"<?xml") for image in images)


def test_conditions_with_long_names_leave_room_for_the_plot() -> None:
    names = [f"max_staleness={eta}, recompute_granularity=selective, num_rollout=80, mismatch_interval=0" for eta in (2, 4)]
    runs = [result(2, "clip", seed, condition={"settings": name}) for seed in (0, 1) for name in names]
    drawn = plots.plot_trade_off({"": runs}, "settings")  # matplotlib warns where the axes have no room
    assert "num_rollout=80" in "".join(texts(drawn))
    assert {f"settings {name}" for name in names} <= texts(drawn), "the legend has each whole"
