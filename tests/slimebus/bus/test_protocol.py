"""Two releases agree on a version of the protocol, or say what each of them speaks."""

import msgspec
import pytest

from slimebus.bus import envelope, protocol
from slimebus.bus import messages as m
from slimebus.bus.errors import ProtocolError


@pytest.fixture
def speaks_1_to_3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "OLDEST_PROTOCOL", 1)
    monkeypatch.setattr(protocol, "PROTOCOL_VERSION", 3)


@pytest.mark.parametrize(("oldest", "newest", "chosen"), [(1, 1, 1), (1, 2, 2), (2, 3, 3), (3, 9, 3), (1, 9, 3)])
@pytest.mark.usefixtures("speaks_1_to_3")
def test_the_newest_common_version_is_chosen(oldest: int, newest: int, chosen: int) -> None:
    assert protocol.choose(oldest, newest, who="'w1'") == chosen


@pytest.mark.parametrize(("oldest", "newest"), [(2, 3), (0, 0), (-5, -1), (2, 1)])
def test_without_a_common_version_the_error_names_both_ranges_and_releases(oldest: int, newest: int) -> None:
    with pytest.raises(ProtocolError) as refused:
        protocol.choose(oldest, newest, who="'w1'", their_release="9.4")
    assert refused.value.code == "protocol_version"
    ours = f"this process (slimebus {protocol.release()}) speaks 1;"
    assert f"'w1' (slimebus 9.4) speaks protocol {protocol.spoken(oldest, newest)}" in refused.value.text
    assert ours in refused.value.text


def _frame(message: m.Message, **changes: object) -> bytes:
    return msgspec.msgpack.encode(msgspec.msgpack.decode(envelope.encode(message, id=7, sender="me")) | changes)


@pytest.mark.parametrize(
    "message", [m.Hello(role="rollout", instance="i", protocol=4, oldest=2), m.Error(code="protocol_version", text="t")]
)
def test_what_negotiates_is_readable_in_any_version(message: m.Message) -> None:
    assert envelope.decode([_frame(message, v=4)]).message == message


@pytest.mark.parametrize("v", [0, -1, 2, 2**40])
def test_any_other_message_of_another_version_is_refused(v: int) -> None:
    with pytest.raises(ProtocolError, match=f"protocol version {v}, this process") as refused:
        envelope.decode([_frame(m.Status(), v=v)])
    assert refused.value.code == "protocol_version"


@pytest.mark.usefixtures("speaks_1_to_3")
def test_a_version_between_the_oldest_and_the_newest_is_read() -> None:
    assert envelope.decode([_frame(m.Status(), v=2)]).message == m.Status()


def test_what_is_left_out_of_a_hello_means_version_1_whatever_is_spoken_here() -> None:
    hello = m.Hello(role="rollout", instance="i")
    assert (hello.protocol, hello.oldest, m.Welcome(run="r", epoch=1, heartbeat_s=1).protocol) == (1, 1, 1)
