"""What a worker passes on while it pulls."""

import pytest

from slimebus.weights.messages import VersionGone
from slimebus.weights.store.server import NotYet, RelayPayloads
from slimebus.weights.tensors import Target

NOW = Target("L", 7)


def test_a_payload_is_passed_on_from_the_moment_it_is_verified() -> None:
    payloads = RelayPayloads()
    payloads.begin(NOW, [("a", 6), ("b", -1)])
    with pytest.raises(NotYet):
        payloads.read("L", 7, "a", 6)
    payloads.add("a", 6, memoryview(b"delta"))
    assert bytes(payloads.read("L", 7, "a", 6)) == b"delta"
    with pytest.raises(NotYet):
        payloads.read("L", 7, "b", -1)


@pytest.mark.parametrize("ask", [("M", 7, "a", 6), ("L", 8, "a", 6)])
def test_what_was_not_asked_for_yet_may_come(ask: tuple[str, int, str, int]) -> None:
    payloads = RelayPayloads()
    payloads.begin(NOW, [("a", 6)])
    with pytest.raises(NotYet) as coming:
        payloads.read(*ask)
    assert not coming.value.is_pulling


@pytest.mark.parametrize("ask", [("L", 6, "a", 6), ("L", 7, "a", 5), ("L", 7, "c", 6)])
def test_what_was_not_pulled_is_gone(ask: tuple[str, int, str, int]) -> None:
    payloads = RelayPayloads()
    payloads.begin(NOW, [("a", 6)])
    with pytest.raises(VersionGone):
        payloads.read(*ask)


def test_a_round_that_ended_early_lets_go_of_who_waits_and_keeps_what_it_has() -> None:
    payloads = RelayPayloads()
    payloads.begin(NOW, [("a", 6), ("b", 6)])
    payloads.add("a", 6, memoryview(b"x"))
    payloads.end()
    with pytest.raises(VersionGone):
        payloads.read("L", 7, "b", 6)
    payloads.begin(NOW, [("a", 6), ("b", -1)])
    assert bytes(payloads.read("L", 7, "a", 6)) == b"x"


def test_an_older_version_is_let_go() -> None:
    payloads = RelayPayloads()
    payloads.begin(NOW, [("a", 6)])
    payloads.add("a", 6, memoryview(b"x"))
    payloads.begin(Target("L", 8), [("a", 7)])
    with pytest.raises(VersionGone):
        payloads.read("L", 7, "a", 6)
