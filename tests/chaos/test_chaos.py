"""kill -9 and SIGSTOP of everything at random moments: every prompt is trained once, or accounted for; and the count itself can fail."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from chaos_faults import DECK, Deck
from chaos_ledger import Ledger, balance
from chaos_run import Chaos, table


@pytest.mark.integration
@pytest.mark.timeout(400)
def test_every_prompt_is_trained_once_or_accounted_for(tmp_path: Path) -> None:
    chaos = Chaos(tmp_path, seed=11, workers=3, mean_gap_s=1.5, durability="os")
    outcome = chaos.carry_out(40.0, until_all_kinds_s=120.0, min_steps=20)
    print("\n".join(table(outcome, chaos.struck)))
    assert not outcome.problems
    assert chaos.has_struck_all(), outcome.faults
    assert outcome.ledger.lineages > 1, "a trainer was lost, and another went on"
    assert len(outcome.ledger.timeline) >= 20
    assert outcome.passed_on_bytes > 0, "the third worker pulls from another one"
    assert outcome.ledger.ended, "some prompts fail or are filtered, and are listed"


# --- the count ---


def row(step: int, lineage: str, *groups: str, lag: int = 0) -> dict[str, Any]:
    return {"step": step, "lineage": lineage, "groups": list(groups), "lag_tokens": {str(lag): 10}}


def counted(rows: list[dict[str, Any]], **changes: Any) -> Ledger:
    """The ledger of six prompts named 0..5; 4 is queued and 5 is dead."""
    told: dict[str, Any] = {
        "next_step": 2,
        "in_play": {"4": "queued"},
        "ended": {"5": ("dead", "always fails")},
        "broker_steps": {0: ["0", "1"], 1: ["2", "3"]},
        "drawn": 6,
        "position_of": lambda name: int(name) if name.isdigit() else None,
        "bound": 1,
    }
    return balance(rows, **told | changes)


GOOD = [row(0, "a", "0", "1"), row(1, "a", "2", "3")]


def test_a_run_without_faults_balances() -> None:
    ledger = counted(GOOD)
    assert ledger.problems == []
    assert ledger.trained == ["0", "1", "2", "3"]


def test_rows_of_an_abandoned_timeline_are_superseded_and_may_train_the_same_group() -> None:
    ledger = counted([row(0, "a", "0", "1"), row(1, "a", "2", "4"), row(2, "a", "3"), row(1, "b", "2", "3")])
    assert ledger.problems == []
    assert (ledger.abandoned_rows, ledger.lineages) == (2, 2)


def test_a_late_row_of_a_replaced_trainer_changes_nothing() -> None:
    ledger = counted([row(0, "a", "0", "1"), row(1, "b", "2", "3"), row(1, "a", "2", "4")])
    assert ledger.problems == []


@pytest.mark.parametrize(
    ("rows", "changes", "problem"),
    [
        ([row(0, "a", "0", "1"), row(1, "a", "1", "2", "3")], {"broker_steps": {}}, "group 1 was trained 2 times"),
        (GOOD, {"in_play": {}}, "1 prompts vanished, at positions [4]"),
        (GOOD, {"ended": {"5": ("dead", "")}}, "group 5 is dead for no reason"),
        (GOOD, {"in_play": {"4": "queued", "0": "ready"}}, "both trained and in play"),
        (GOOD, {"in_play": {"4": "queued", "5": "ready"}}, "both in play and ended"),
        ([row(0, "a", "0", "1"), row(1, "a", "2", "3", lag=2)], {}, "10 tokens of staleness 2 were trained; the bound is 1"),
        (GOOD[:1], {"in_play": {"4": "queued", "2": "queued", "3": "queued"}}, "steps [1] are committed"),
        ([row(0, "a", "1", "0"), GOOD[1]], {}, "step 0: the trainer trained ['1', '0'], the broker has ['0', '1']"),
        (GOOD, {"in_play": {"4": "queued", "x": "queued"}}, "groups ['x'] were never drawn"),
    ],
)
def test_the_count_finds(rows: list[dict[str, Any]], changes: dict[str, Any], problem: str) -> None:
    assert any(problem in found for found in counted(rows, **changes).problems), counted(rows, **changes).problems


# --- the faults ---


def test_the_faults_of_a_seed_are_always_the_same_and_all_kinds_come() -> None:
    one, again, other = (Deck(seed, mean_gap_s=2.0, long_stop_s=4.0) for seed in (3, 3, 4))
    first = [one.draw() for _ in range(len(DECK))]
    assert first == [again.draw() for _ in range(len(DECK))]
    assert first != [other.draw() for _ in range(len(DECK))]
    assert {(fault.kind, fault.target) for fault in first} == set(DECK)
