"""Numbers that mean nothing are refused before anything is decided, whatever message and field they stand in."""

from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from slimebus.bus import envelope
from slimebus.bus import messages as m
from slimebus.bus.errors import ProtocolError


def _integers() -> list[tuple[type[m.Message], str]]:
    """Every field of a request that is an int, or may be one."""
    return [
        (cls, name)
        for cls in m.REQUESTS
        for name, hint in get_type_hints(cls).items()
        if hint is int or (int in get_args(hint) and type(None) in get_args(hint))
    ]


def _refusal(cls: type[m.Message], body: dict[str, Any]) -> str:
    header = envelope.Header(v=1, type=m.wire_name(cls), id=1, body=msgspec.Raw(msgspec.msgpack.encode(body)))
    with pytest.raises(ProtocolError) as refused:
        envelope.decode_body(header)
    return refused.value.text


FULL: dict[type[m.Message], dict[str, Any]] = {
    cls: {
        field.name: {"role": "client", "outcome": "drop", "action": "drop"}.get(field.name, "x")
        for field in msgspec.structs.fields(cls)
        if field.required
    }
    | {name: 1 for c, name in _integers() if c is cls}
    | {name: 0.0 for name in ("wait_s",) if name in get_type_hints(cls)}
    | {name: ["x"] for name in ("publishers", "groups") if name in get_type_hints(cls)}
    for cls in m.REQUESTS
}


@pytest.mark.parametrize(("cls", "name"), _integers(), ids=lambda part: part if isinstance(part, str) else m.wire_name(part))
@pytest.mark.parametrize("number", [-2, 2**63, 2**64 - 1])
def test_a_number_out_of_range_is_refused_and_its_field_named(cls: type[m.Message], name: str, number: int) -> None:
    body = FULL[cls] | ({"groups": {}} if cls is m.Reject else {})
    assert f"`body.{name}`" in _refusal(cls, body | {name: number})


@pytest.mark.parametrize(
    "message",
    [
        m.Commit(step=0, checkpoint=-1),
        m.Commit(step=0, checkpoint=2**63),
        m.Reject(step=2**63, groups={}),
        m.Batch(step=-1, wait_s=0.0),
        m.Batch(step=2**40, wait_s=0.0),
        m.Resume(step=0, version=2**40, lineage="L2"),
        m.Resume(step=2**40, version=0, lineage="L2"),
        m.Resume(step=0, version=-1, lineage="L2"),
        m.Resume(step=0, version=0, lineage=""),
        m.Publish(lineage="L", version=1, publishers=[], digest=""),
    ],
    ids=str,
)
def test_the_trainer_is_told_of_a_number_that_means_nothing(desk: Any, message: m.Message) -> None:
    before = desk.status["groups"]
    assert desk.ask("t", message).code == "protocol"
    assert desk.status["groups"] == before
    assert desk.ask("w", m.Heartbeat(serving=-2)).code == "protocol"
