"""Rules that contradict themselves are refused in words."""

from typing import Any

import pytest

from broker.state.rules import HeldOutSet, Rules
from broker.state.timers import Timers
from slimebus.bus.errors import ConfigError


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"batch_size": 0}, "batch_size is 0; expected a whole number >= 1"),
        ({"batch_size": 5000, "buffer_capacity": 5000}, "<= 2048"),
        ({"max_staleness": -1}, "max_staleness is -1"),
        ({"max_staleness": float("nan")}, "max_staleness is nan"),
        ({"buffer_capacity": 1}, "no batch would ever fill"),
        ({"lease_s": 1.0, "heartbeat_s": 2.0}, "every lease expires"),
        ({"lease_s": float("inf")}, "lease_s is inf; expected a number > 0 and <= 604800"),
        ({"lease_s": 1e308}, "<= 604800"),
        ({"fill_first": True, "max_staleness": float("inf")}, "not known what is full"),
        ({"eval_datasets": {"a/b": HeldOutSet(num_prompts=1)}}, "without '/'"),
    ],
)
def test_a_rule_out_of_range_is_named(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Rules(**({"batch_size": 4} | wrong))


def test_a_timer_moved_later_falls_due_once_and_then() -> None:
    timers = Timers()
    timers.set("a", 1.0)
    timers.set("a", 5.0)
    timers.set("b", 3.0)
    timers.cancel("b")
    assert list(timers.due(4.0)) == []
    assert list(timers.due(5.0)) == ["a"]
    assert list(timers.due(9.0)) == []
    timers.set("a", 9.0)
    timers.set("a", 6.0)
    assert list(timers.due(6.0)) == ["a"]
    assert list(timers.due(10.0)) == []
