"""The time that the broker was awake."""

from manual_clock import ManualClock

from broker.suspend_tolerant_clock import LONGEST_TURN_S, MAX_UNCHECKED_S, SuspendTolerantClock


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


def test_after_a_stop_nobody_is_judged_before_what_had_arrived_is_read() -> None:
    machine = ManualClock()
    awake = SuspendTolerantClock(machine)
    machine.advance(600.0)
    awake.advance()
    assert not awake.may_check_deadlines(all_heard=False)
    assert awake.may_check_deadlines(all_heard=True)


def test_under_constant_load_deadlines_are_looked_at_all_the_same() -> None:
    machine = ManualClock()
    awake = SuspendTolerantClock(machine)
    assert not awake.may_check_deadlines(all_heard=False)
    machine.advance(MAX_UNCHECKED_S)
    awake.advance()
    assert awake.may_check_deadlines(all_heard=False)
    assert not awake.may_check_deadlines(all_heard=False)
