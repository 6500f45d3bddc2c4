"""Virtual time, and work that takes longer where cores are shared."""

import pytest

from broker.simulate.timeline import Timeline


def test_work_takes_its_own_seconds_at_full_pace_and_more_below() -> None:
    timeline, ends = Timeline(), []
    timeline.after_work(2.0, lambda: ends.append(timeline.now))
    timeline.later(1.0, lambda: setattr(timeline, "pace", 0.5))
    timeline.later(9.0, lambda: ends.append(timeline.now))
    while timeline.next_at() < float("inf"):
        timeline.step()
    assert ends == [pytest.approx(3.0), pytest.approx(9.0)]  # one second at full pace, then one at half of it
    assert timeline.worked == pytest.approx(5.0)


def test_what_is_due_together_happens_in_the_order_it_was_asked_for() -> None:
    timeline, order = Timeline(), []
    for name in "abc":
        timeline.after_work(1.0, lambda name=name: order.append(name))  # type: ignore[misc]
    while timeline.next_at() < float("inf"):
        timeline.step()
    assert order == ["a", "b", "c"]
