"""A run's status as a terminal shows it: a screen of any size, lines for one look, one line."""

from typing import Any

import pytest
from made_status import WHOLE
from rich.console import Console

from slimebus.view.terminal import brief, plain_line, screen, sparkline, time_left

STEP = {"reward": 0.625, "lag_mean": 1.98, "lag_max": 2, "num_tokens": 13_876, "train_s": 0.75, "wait_s": 0.25, "elapsed_s": 10.0}


def status(**changes: Any) -> dict[str, Any]:
    """What the broker says of a run half done, whose worker made 141,000 tokens in the ten seconds before its last step."""
    return {
        **WHOLE,
        "step": 60,
        "num_steps": 120,
        "pace": {"step_s": 0.5},
        "steps": [
            {"step": 58, "rollout_tokens": 0.0, "metrics": {**STEP, "reward": 0.25, "elapsed_s": 0.0}},
            {"step": 59, "rollout_tokens": 141_000.0, "metrics": {**STEP, "loss": 0.125, "grad_norm": 0.5, "approx_kl": 0.001}},
        ],
        "evaluations": [
            {**WHOLE["evaluations"][0], "version": version, "mean_reward": score} for version, score in ((0, 0.43), (50, 0.912))
        ],
        "groups": {"queued": 0, "leased": 32, "ready": 12, "assigned": 31, "dead": 0},
        "waiting": ["trainer waits for a batch: 12 of 32 groups are ready"],
        **changes,
    }


def lines_of(shown: dict[str, Any], width: int = 110, height: int = 40, problem: str = "") -> list[str]:
    console = Console(width=width, height=height, color_system=None)
    with console.capture() as capture:
        console.print(screen(shown, is_supervised=False, width=width, height=height, problem=problem))
    return capture.get().splitlines()


@pytest.mark.parametrize(
    "part",
    [
        "mine: running",
        "60/120  10 s, 30 s left",
        "▁█  0.625",
        "loss 0.125, grad_norm 0.5, approx_kl 0.001",
        "0.912 (0.430 before)",
        "mean 1.98, largest 2, bound 2",
        "trainer 13.9 k, 2 workers 14.1 k",
        "0 queued, 32 leased, 12 ready, 31 assigned",
        "waiting    trainer waits for a batch: 12 of 32 groups are ready",
        "waste      3 groups stale (9 tokens)",
        "w2       rollout  serving               1    8       1.2 k     1 s ago",
        "59    0.625   0.125  0.5        0.001      1.98      2",
        "held     50       0.912        0.4  0.6   90           0",
        "2    27              84%",
        "wasted: stale  3       9",
    ],
)
def test_a_screen_shows_every_part_of_the_status(part: str) -> None:
    assert part in "\n".join(lines_of(status()))


CROWDED = status(
    steps=[{"step": step, "metrics": STEP} for step in range(64)],
    clients=[{**WHOLE["clients"][1], "name": f"worker-{i}-" + "x" * 100} for i in range(500)],
    waiting=["worker w0 waits for a version " * 9] * 50,
    stalled={"since_s": 40.0, "limit_s": 30.0, "reason": "trainer t has been silent " * 9},
)
EARLY = status(step=0, steps=[], evaluations=[], clients=[], waiting=[])


@pytest.mark.parametrize("shown", [CROWDED, EARLY, status(), status(num_steps=None)])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (200, 50), (40, 10), (20, 4), (1, 1)])
def test_a_screen_has_exactly_the_size_of_the_terminal(shown: dict[str, Any], width: int, height: int) -> None:
    lines = lines_of(shown, width, height, problem="no answer for 9 s")
    assert len(lines) == max(2, height)
    assert {len(line) for line in lines} == {width} or width == 1


def test_tables_stand_side_by_side_where_the_terminal_is_wide_enough() -> None:
    def rows_of_heads(width: int) -> list[int]:
        lines = lines_of(status(), width, 50)
        heads = ("process  role", "step  reward", "dataset  version", "trained groups")
        return [next(i for i, line in enumerate(lines) if head in line) for head in heads]

    assert len(set(rows_of_heads(80))) == 4
    assert len(set(rows_of_heads(300))) == 1


def test_a_table_without_rows_is_left_out() -> None:
    lines = [line.strip("│ ") for line in (*lines_of(EARLY), *brief(EARLY, is_supervised=False))]
    assert not [line for line in lines if line == "step" or line.startswith(("process  ", "dataset  "))]


def test_tables_that_are_too_long_share_the_room_and_say_how_much_is_left_out() -> None:
    text = "\n".join(lines_of(CROWDED, 120, 40))
    processes, steps, evaluations = text.count(" starting: its engine "), text.count(" 1.98      2 "), text.count(" held ")
    assert f"and {500 - processes} more" in text
    assert f"and {64 - steps} more" in text
    assert min(processes, steps) >= 3
    assert evaluations == 2, "a short one is shown whole"


def test_an_absent_broker_and_a_stall_stand_first_and_in_whole() -> None:
    reason = "trainer waits for batch 41: 3 of 16 groups ready; 13 leased by w2, silent for 94 s"
    shown = status(stalled={"since_s": 94.0, "limit_s": 41.0, "reason": reason})
    title, *lines = lines_of(shown, 80, 24, problem="no answer for 9 s: no broker listens at tcp://[x]:1")
    assert "mine: no answer" in title
    assert lines[0].startswith("│ no answer for 9 s: no broker listens at tcp://[x]:1")
    assert " ".join(line.strip("│ ") for line in lines[1:3]) == f"stalled for 94 s (limit 41 s): {reason}"


def test_a_few_waits_are_shown_each_from_its_beginning_and_the_others_counted() -> None:
    lines = lines_of(status(waiting=[f"w{i} waits for [a version] {'and waits ' * 30}" for i in range(9)]), 80, 24)
    assert [i for i in range(9) if any(f"w{i} waits for [a version]" in line for line in lines)] == [0, 1, 2]
    assert any("(6 more wait)" in line for line in lines)
    assert any("waiting    nobody" in line for line in lines_of(EARLY))


def test_a_run_of_sft_is_shown_by_its_loss() -> None:
    steps = [{"step": 3, "metrics": {**STEP, "loss": 1.5, "grad_norm": 2.0}}]
    text = "\n".join(brief(status(steps=steps), is_supervised=True))
    assert "loss       1.500" in text
    assert "learning   grad_norm 2\n" in text


def test_line_is_one_plain_line() -> None:
    assert plain_line(status(), is_supervised=False) == (
        "mine running | step 60/120  10 s, 30 s left | reward 0.625 | held-out 0.912 (0.430 before) | lag mean 1.98, largest 2, bound 2"
        " | tokens/s trainer 13.9 k, 2 workers 14.1 k | trainer waits for a batch: 12 of 32 groups are ready"
    )


UNSCORED = {**WHOLE["evaluations"][0], "done": False, "mean_reward": None}
GONE = [{**client, "state": "gone"} for client in WHOLE["clients"]]
NEW = {**WHOLE["clients"][2], "metrics": {"tokens": 5000.0, "serving_s": 10.0}}


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"step": 0, "steps": [], "evaluations": [UNSCORED]}, "| reward none yet | held-out not measured |"),
        ({"clients": [NEW], "steps": []}, "1 worker 500"),  # before the second step: the mean pace of its life
        ({"clients": GONE}, "0 workers 0 |"),
        ({"clients": [], "state": "finished"}, "workers 14.1 k |"),
        ({"settings": {"max_staleness": "unbounded"}}, "bound unbounded"),
    ],
)
def test_what_is_not_known_or_has_left_is_not_shown_as_a_number(changes: dict[str, Any], part: str) -> None:
    assert part in plain_line(status(**changes), is_supervised=False)


def test_processes_that_left_stand_below_those_that_work() -> None:
    clients = [{**WHOLE["clients"][2], "name": "old", "state": "gone"}, *WHOLE["clients"]]
    lines = brief(status(clients=clients), is_supervised=False)
    assert [line.split()[0] for line in lines if " rollout " in line] == ["w1", "w2", "old"]


def test_sparkline_spans_the_values_it_shows() -> None:
    assert sparkline([0.0, 0.5, 1.0], 9) == "▁▅█"
    assert sparkline([9.0, 0.0, 1.0], 2) == "▁█"
    assert sparkline([0.3, 0.3], 9) == "▄▄"
    assert sparkline([], 9) == sparkline([1.0], 0) == ""


def test_time_left_follows_the_pace_of_the_last_steps() -> None:
    assert time_left(38, 60, 0.5) == "38 s, 30 s left"
    assert time_left(38, 60, 0.0) == "38 s"
    assert time_left(38, 0, 0.5) == "38 s"


def test_bad_prompts_are_counted() -> None:
    assert "  skipped    7 bad prompts" in brief(status(source={"skipped": 7}), is_supervised=False)


def test_what_peers_say_cannot_command_the_terminal() -> None:
    evil = "x\x1b]0;title\x07\x1b[2J\n\u202e"
    client = {**WHOLE["clients"][2], "name": evil, "state": evil}
    shown = status(clients=[client], waiting=[f"worker {evil} waits"], stalled={"since_s": 1.0, "limit_s": 1.0, "reason": evil})
    lines = [*brief(shown, is_supervised=False), plain_line(shown, is_supervised=False), *lines_of(shown, problem=evil)]
    assert not [line for line in lines if not line.isprintable()]
    assert any(r"\x1b[2J" in line for line in lines)


@pytest.mark.parametrize("shown", [status(), CROWDED])
def test_a_narrow_screen_leaves_out_columns_and_cuts_none(shown: dict[str, Any]) -> None:
    tables = [line for line in lines_of(shown, 80, 24) if line.startswith(("│ process", "│ step  reward", "│ 59 ", "│ worker-", "│ t  "))]
    assert len(tables) > 1
    assert not [line for line in tables if line.rstrip(" │").endswith("…")]
