"""What a worker passes on while it pulls."""

import pytest

from slimebus.weights.messages import VersionGone
from slimebus.weights.store.server import NotYet, RelayPayloads
from slimebus.weights.tensors import Target

NOW = Target("L", 7)


@pytest.fixture
def payloads() -> RelayPayloads:
    """A round pulls a and b; a is here."""
    made = RelayPayloads()
    made.begin(NOW, [("a", 6), ("b", -1)])
    made.add("a", 6, memoryview(b"delta"))
    return made


def test_a_payload_is_passed_on_from_the_moment_it_is_verified_also_after_its_round(payloads: RelayPayloads) -> None:
    assert bytes(payloads.read("L", 7, "a", 6)) == b"delta"
    payloads.end()
    payloads.begin(NOW, [("a", 6), ("b", -1)])
    assert bytes(payloads.read("L", 7, "a", 6)) == b"delta"


@pytest.mark.parametrize(("ask", "is_pulling"), [(("L", 7, "b", -1), True), (("M", 7, "a", 6), False), (("L", 8, "a", 6), False)])
def test_what_is_on_its_way_or_was_not_asked_for_yet_may_come(
    payloads: RelayPayloads, ask: tuple[str, int, str, int], is_pulling: bool
) -> None:
    with pytest.raises(NotYet) as coming:
        payloads.read(*ask)
    assert coming.value.is_pulling == is_pulling


@pytest.mark.parametrize("ask", [("L", 6, "a", 6), ("L", 7, "a", 5), ("L", 7, "c", 6)])
def test_what_was_not_pulled_is_gone(payloads: RelayPayloads, ask: tuple[str, int, str, int]) -> None:
    with pytest.raises(VersionGone):
        payloads.read(*ask)


def test_what_did_not_come_before_its_round_ended_is_gone_and_so_is_an_older_version(payloads: RelayPayloads) -> None:
    payloads.end()
    with pytest.raises(VersionGone):
        payloads.read("L", 7, "b", -1)
    payloads.begin(Target("L", 8), [("a", 7)])
    with pytest.raises(VersionGone):
        payloads.read("L", 7, "a", 6)
