"""What a worker passes on while it pulls."""

import pytest

from slimebus.weights.messages import VersionGone
from slimebus.weights.onward import NotYet, Onward
from slimebus.weights.plan import Target

NOW = Target("L", 7)


def test_a_payload_is_passed_on_from_the_moment_it_is_verified() -> None:
    onward = Onward()
    onward.begin(NOW, [("a", 6), ("b", -1)])
    with pytest.raises(NotYet):
        onward.read("L", 7, "a", 6)
    onward.add("a", 6, memoryview(b"delta"))
    assert bytes(onward.read("L", 7, "a", 6)) == b"delta"
    with pytest.raises(NotYet):
        onward.read("L", 7, "b", -1)


@pytest.mark.parametrize("ask", [("L", 6, "a", 6), ("M", 7, "a", 6), ("L", 7, "a", 5), ("L", 7, "c", 6)])
def test_what_was_not_pulled_is_gone(ask: tuple[str, int, str, int]) -> None:
    onward = Onward()
    onward.begin(NOW, [("a", 6)])
    with pytest.raises(VersionGone):
        onward.read(*ask)


def test_a_round_that_ended_early_lets_go_of_who_waits_and_keeps_what_it_has() -> None:
    onward, woken = Onward(), []
    onward.when_more = lambda: woken.append(True)
    onward.begin(NOW, [("a", 6), ("b", 6)])
    onward.add("a", 6, memoryview(b"x"))
    onward.end()
    with pytest.raises(VersionGone):
        onward.read("L", 7, "b", 6)
    onward.begin(NOW, [("a", 6), ("b", -1)])
    assert bytes(onward.read("L", 7, "a", 6)) == b"x"
    assert len(woken) == 4


def test_an_older_version_is_let_go() -> None:
    onward = Onward()
    onward.begin(NOW, [("a", 6)])
    onward.add("a", 6, memoryview(b"x"))
    onward.begin(Target("L", 8), [("a", 7)])
    with pytest.raises(VersionGone):
        onward.read("L", 7, "a", 6)
