"""Admission and the bookkeeping of rows."""

from __future__ import annotations

import pytest

from rollout.embedded.kv_cache import Prefix
from rollout.embedded.scheduler import Scheduler


class RoomFor:
    """A cache for so many tokens that knows none; what it gave it never gets back."""

    def __init__(self, num_tokens: int) -> None:
        self.left = num_tokens

    def match(self, sequence) -> Prefix:
        return Prefix(0, [], [])

    def can_allocate(self, sequence, prefix) -> bool:
        return sequence.max_tokens <= self.left

    def allocate(self, sequence, prefix) -> None:
        self.left -= sequence.max_tokens


@pytest.fixture
def scheduler():
    return Scheduler(max_running=4, max_prefill_tokens=10, cache=RoomFor(60))


def test_admits_in_order_up_to_the_row_limit(scheduler, sequence_of):
    sequences = [sequence_of(f"{i}.", [i, 2], max_new_tokens=4) for i in range(6)]
    scheduler.add(sequences)
    assert scheduler.admit() == ([], sequences[:4])
    assert list(scheduler.waiting) == sequences[4:]


def test_one_prefill_batch_holds_at_most_its_tokens_but_always_one_sequence(scheduler, sequence_of):
    long, short = sequence_of("long.", [1] * 12, max_new_tokens=1), sequence_of("short.", [1, 2], max_new_tokens=1)
    scheduler.add([long, short])
    assert scheduler.admit() == ([], [long])
    assert scheduler.admit() == ([], [short])


def test_what_the_cache_cannot_hold_waits(scheduler, sequence_of):
    scheduler.add([sequence_of(f"{i}.", [i, 2], max_new_tokens=24) for i in range(3)])
    assert len(scheduler.admit()[1]) == 2


def test_a_full_batch_waits_for_several_free_rows_before_it_admits_again(sequence_of):
    scheduler = Scheduler(max_running=32, max_prefill_tokens=100, cache=RoomFor(10_000))
    scheduler.add([sequence_of(f"{i}.", [i, 2]) for i in range(40)])
    scheduler.admit()
    scheduler.remove_running([0])
    assert scheduler.admit() == ([], [])
    scheduler.remove_running([0])
    assert len(scheduler.admit()[1]) == 2


def test_removed_rows_are_filled_from_the_end(scheduler, sequence_of):
    sequences = [sequence_of(f"{i}.", [i, 2], max_new_tokens=4) for i in range(4)]
    scheduler.add(sequences)
    scheduler.admit()
    sources, targets = scheduler.remove_running([0, 3])
    assert (sources, targets) == ([2], [0])
    assert scheduler.running == [sequences[2], sequences[1]]


def test_retracted_sequences_go_first_and_oldest_first(scheduler, sequence_of):
    sequences = [sequence_of(f"{i}.", [i, 2], max_new_tokens=4) for i in range(5)]
    scheduler.add(sequences)
    scheduler.admit()
    scheduler.retract_all()
    assert list(scheduler.waiting) == sequences
    assert [sequence.num_retractions for sequence in sequences] == [1, 1, 1, 1, 0]


def test_a_prompt_that_is_known_but_for_its_last_token_only_decodes(scheduler, sequence_of):
    new, known = sequence_of("new.", [1] * 8, max_new_tokens=1), sequence_of("known.", [1], max_new_tokens=1)
    scheduler.add([new, known])
    assert scheduler.admit() == ([known], [new])


def test_equal_prompts_wait_for_the_first_to_be_known(scheduler, sequence_of):
    first, second, other = (sequence_of(rid, [token, 2], max_new_tokens=1) for rid, token in (("a.", 7), ("b.", 7), ("c.", 8)))
    scheduler.add([first, second, other])
    assert scheduler.admit() == ([], [first, other])
    assert list(scheduler.waiting) == [second]
