"""Counting by id: what the surviving weights learned from, and where every other prompt is.

    metrics/batches.jsonl   one row for each batch that a trainer took, written by the trainer before it trained it
    the broker's store      what is in play, what ended and why, and the broker's own record of each step

Nothing here asks the broker what it believes; ids are counted.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

Row = Mapping[str, Any]


class Ledger(msgspec.Struct, kw_only=True):
    """Where every prompt that left the source is. `timeline`: step -> its surviving row; `problems` is empty when all is well."""

    timeline: dict[int, Row]
    trained: list[str]
    in_play: dict[str, str]
    ended: dict[str, tuple[str, str]]
    abandoned_rows: int
    lineages: int
    lag_tokens: dict[int, int]
    problems: list[str]

    def ended_by_reason(self) -> dict[str, int]:
        """`dead: hook failed` -> how many."""
        return dict(Counter(f"{phase}: {reason}" for phase, reason in self.ended.values()))

    def in_play_by_phase(self) -> dict[str, int]:
        """`leased` -> how many."""
        return dict(Counter(self.in_play.values()))


def surviving(rows: Iterable[Row]) -> tuple[dict[int, Row], int, int]:
    """step -> row of the timeline that survived, the number of rows that did not, and of lineages.

    A lineage is one life of a trainer. It begins where its first row says, and what earlier lineages trained from there on is
    abandoned. A trainer that was replaced may still write a row before it learns of it: that row belongs to its own, older lineage.
    """
    lives: dict[str, dict[int, Row]] = {}
    total = 0
    for row in rows:
        total += 1
        lives.setdefault(row["lineage"], {})[row["step"]] = row
    timeline: dict[int, Row] = {}
    for life in lives.values():
        first = min(life)
        timeline = {step: row for step, row in timeline.items() if step < first} | life
    return timeline, total - len(timeline), len(lives)


def balance(
    rows: Iterable[Row],
    *,
    next_step: int,
    in_play: Mapping[str, str],
    ended: Mapping[str, tuple[str, str]],
    broker_steps: Mapping[int, list[str]],
    drawn: int,
    position_of: Callable[[str], int | None],
    bound: float,
) -> Ledger:
    """Count. in_play: id -> phase of what is neither trained nor ended; ended: id -> (dropped | dead, reason); drawn: prompts taken
    from the source; position_of: the place of an id in it; next_step: the first step that was not committed."""
    timeline, abandoned, lineages = surviving(rows)
    timeline = {step: row for step, row in timeline.items() if step < next_step}
    trained = [group for _, row in sorted(timeline.items()) for group in row["groups"]]
    lags: Counter[int] = Counter()
    for row in timeline.values():
        lags.update({int(lag): count for lag, count in row["lag_tokens"].items()})
    problems = [
        *_steps_missing(timeline, next_step),
        *_trained_twice(trained),
        *_in_two_places(set(trained), set(in_play), set(ended)),
        *_vanished({*trained, *in_play, *ended}, drawn, position_of),
        *_disagreements(timeline, broker_steps),
        *(f"group {name} is {phase} for no reason" for name, (phase, reason) in ended.items() if not reason),
        *_too_stale(lags, bound),
    ]
    return Ledger(
        timeline=timeline,
        trained=trained,
        in_play=dict(in_play),
        ended=dict(ended),
        abandoned_rows=abandoned,
        lineages=lineages,
        lag_tokens=dict(sorted(lags.items())),
        problems=problems,
    )


def _too_stale(lags: Mapping[int, int], bound: float) -> list[str]:
    beyond = {lag: count for lag, count in lags.items() if not 0 <= lag <= bound}
    return [f"{count} tokens of staleness {lag} were trained; the bound is {bound:g}" for lag, count in beyond.items()]


def _steps_missing(timeline: Mapping[int, Row], next_step: int) -> list[str]:
    missing = sorted(set(range(next_step)) - timeline.keys())
    return [f"steps {missing} are committed, but no trainer has a record of their batches"] if missing else []


def _trained_twice(trained: list[str]) -> list[str]:
    return [f"group {name} was trained {count} times" for name, count in Counter(trained).items() if count > 1]


def _in_two_places(trained: set[str], in_play: set[str], ended: set[str]) -> list[str]:
    pairs = (("trained", trained, "in play", in_play), ("trained", trained, "ended", ended), ("in play", in_play, "ended", ended))
    return [f"groups {sorted(a & b)[:8]} are both {first} and {second}" for first, a, second, b in pairs if a & b]


def _vanished(found: set[str], drawn: int, position_of: Callable[[str], int | None]) -> list[str]:
    positions = {name: position_of(name) for name in found}
    strangers = [name for name, position in positions.items() if position is None or position >= drawn]
    missing = sorted(set(range(drawn)) - set(positions.values()))  # type: ignore[type-var]
    problems = [f"groups {strangers[:8]} were never drawn from the source"] if strangers else []
    if missing:
        problems.append(f"{len(missing)} prompts vanished, at positions {missing[:8]} of the source: neither trained, in play nor ended")
    return problems


def _disagreements(timeline: Mapping[int, Row], broker_steps: Mapping[int, list[str]]) -> list[str]:
    return [
        f"step {step}: the trainer trained {list(timeline[step]['groups'])}, the broker has {groups} on record"
        for step, groups in broker_steps.items()
        if step in timeline and list(timeline[step]["groups"]) != list(groups)
    ]
