"""The time that the broker was awake."""

from manual_clock import ManualClock

from broker.suspend_tolerant_clock import LONGEST_TURN_S, MAX_UNREAD_S, SuspendTolerantClock


def test_time_goes_on_while_turns_follow_each_other() -> None:
    machine = ManualClock(1000.0)
    awake = SuspendTolerantClock(machine)
    for _ in range(10):
        machine.advance(0.5)
        awake.advance()
    assert awake.now == 5.0


def test_a_stop_of_the_process_or_a_jump_of_the_clock_counts_as_one_long_turn() -> None:
    machine = ManualClock(1000.0)
    awake = SuspendTolerantClock(machine)
    machine.advance(600.0)
    assert awake.advance() == LONGEST_TURN_S
    machine.advance(-900.0)
    assert awake.advance() == LONGEST_TURN_S
    machine.advance(1.0)
    assert awake.advance() == LONGEST_TURN_S + 1.0


def test_after_a_stop_no_deadline_is_checked_before_what_had_arrived_is_read() -> None:
    machine = ManualClock()
    awake = SuspendTolerantClock(machine)
    assert awake.heard_until(all_heard=True) == 0.0
    machine.advance(600.0)
    awake.advance()
    assert awake.heard_until(all_heard=False) == 0.0
    assert awake.heard_until(all_heard=True) == LONGEST_TURN_S


def test_under_constant_load_deadlines_are_checked_late() -> None:
    machine = ManualClock()
    awake = SuspendTolerantClock(machine)
    for _ in range(12):
        machine.advance(1.0)
        awake.advance()
        assert awake.heard_until(all_heard=False) == max(0.0, awake.now - MAX_UNREAD_S)
