"""Each field of each request: of a wrong type, of an absurd size, of another lineage, with what a terminal would obey; and others' names.

Whatever comes, the broker answers it or parks it, its tables agree, and what people read of it is printable and bounded.
"""

import json
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
from made_samples import frames, made

from broker.state.clients import WITHOUT_HELLO
from broker.state.effects import Address, Event
from slimebus.bus import envelope
from slimebus.bus import messages as m
from slimebus.bus.errors import ProtocolError
from slimebus.security.roles import SENDERS
from slimebus.view import terminal

ESCAPE = "\x1b]0;title\x07\nroot: all is well\x00\u202e"
RUDE: list[Any] = [
    *(None, True, 7, -1, 2**63, 2**64 - 1, -(2**63), 1.5, float("nan"), float("inf"), 1e308),
    *("", "another", "\ud7ff" * 300, "x" * 200_000, ESCAPE, b"\x00\xff", b"x" * 100_000),
    *([], [[[]]], [ESCAPE], [7], ["x"] * 5000, [None], [-1] * 5000, [{}], [{"url": ESCAPE, "model": ESCAPE, "state": ESCAPE}] * 256),
    *({}, {ESCAPE: ESCAPE}, {ESCAPE: 1e308}, {"a": 7}, {"": ""}, {"a": {"text": ESCAPE, "done": True}}, {str(i): 0.5 for i in range(5000)}),
]
SOUND: dict[type[m.Message], dict[str, Any]] = {
    m.Hello: {"role": "rollout", "instance": "2"},
    m.Heartbeat: {},
    m.Goodbye: {},
    m.Lease: {"want": 1, "wait_s": 5.0, "lineage": "L", "serving": 0},
    m.Put: {"group": "0/0", "lease": 1, "lineage": "L"},
    m.GiveBack: {"group": "0/0", "lease": 1, "outcome": "requeue", "reason": "why"},
    m.Resume: {"step": 0, "version": 0, "lineage": "M"},
    m.Publish: {"lineage": "L", "version": 0, "publishers": ["tcp://p:1"], "digest": "d"},
    m.Batch: {"step": 0, "wait_s": 5.0},
    m.Fetch: {"groups": ["0/1"]},
    m.Reject: {"step": 0, "groups": {"0/1": "why"}},
    m.Commit: {"step": 0},
    m.Finish: {},
    m.Read: {"count": 1, "wait_s": 5.0},
    m.PutFields: {"group": "0/1", "lease": 2},
    m.Status: {},
    m.Keys: {},
    m.Evaluate: {"key": "k"},
    m.Set: {"key": "k"},
    m.Push: {"key": "k"},
    m.Edit: {"action": "drop", "groups": ["0/1"]},
    m.Import: {"group": "import/1"},
    m.Command: {"key": "k", "action": "drain", "worker": "w"},
}
NAMES = {"rollout": "w", "trainer": "t", "consumer": "c", "client": "p", "viewer": "v"}
KEYED = [cls for cls in SOUND if cls not in WITHOUT_HELLO]


@pytest.fixture
def crowd(new_desk: Any) -> Any:
    """A desk whose machine compares its tables after each event, with a process of each role, a lease, and a group that is ready."""
    desk = new_desk(max_staleness=4)
    desk.machine.validates = True
    desk.begin()
    desk.join("c", "consumer")
    desk.join("p", "client")
    desk.lease()
    desk.fill(1)
    return desk


def say(desk: Any, name: str, cls: type[m.Message], body: dict[str, Any], **how: Any) -> m.Message | None:
    """The answer to a body that no message class has checked; None while it is parked."""
    desk.request += 1
    header = {"v": 1, "type": m.wire_name(cls), "id": desk.request, "body": body, "run": "r", "sender": name}
    try:
        decoded = envelope.decode_header(msgpack.packb(header))
        message = envelope.decode_body(decoded)
    except ProtocolError as bad:
        return envelope.error_reply(bad)
    about = {"epoch": desk.epochs.get(name, 0), "key": "", "bulk": frames(made((0, 4)), num_samples=1)} | how
    event = Event(to=Address(name.encode(), desk.request), sender=name, run="r", message=message, **about)
    desk.perform(desk.machine.apply([event], desk.now))
    return desk.answers.pop(desk.request, None)


def texts(value: Any) -> Iterator[str]:
    """Every text in it."""
    if isinstance(value, str):
        yield value
    for part in [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        yield from texts(part)


def test_every_request_and_every_field_is_tried() -> None:
    assert set(SOUND) == set(m.REQUESTS)


@pytest.mark.parametrize("cls", SOUND, ids=lambda cls: cls.__name__)
def test_no_value_of_any_field_breaks_the_broker_or_reaches_a_terminal(crowd: Any, cls: type[m.Message]) -> None:
    for field in cls.__struct_fields__:
        for value in RUDE:
            for role in SENDERS[m.wire_name(cls)]:
                answer = say(crowd, NAMES[role], cls, SOUND[cls] | {field: value})
                if isinstance(answer, m.Error):
                    assert answer.text.isprintable()
                    assert len(answer.text) <= envelope.MAX_TEXT_CHARS
    outcome = say(crowd, "p", m.Command, SOUND[m.Command] | {"key": "a"})
    assert not isinstance(outcome, m.CommandReply) or outcome.text.isprintable()
    crowd.pass_time(6.0)
    assert [note for note in crowd.notes if not note.isprintable() or len(note) > envelope.MAX_TEXT_CHARS] == []
    status = crowd.status | {"security": {}, "store": {}, "bounds": {}, "refused": {}}
    assert len(json.dumps(status)) < 1_000_000
    json.dumps(status, allow_nan=False)
    shown = [*terminal.brief(status, is_supervised=False), terminal.plain_line(status, is_supervised=False)]
    assert [line for line in shown if not line.isprintable()] == []


@pytest.mark.parametrize("role", ["rollout", "trainer", "consumer", "client"])
def test_what_a_hello_says_to_people_is_printable(crowd: Any, role: str) -> None:
    """Settings are compared with those of others, and the sentences about them are logged and sent."""
    crowd.state.rules.agreed["seed"] = "1"
    said = {"role": role, "instance": "9", "settings": {"seed": ESCAPE, "model.hf_checkpoint": ESCAPE}, "release": ESCAPE, "host": ESCAPE}
    welcome = say(crowd, f"new {role}", m.Hello, said | {"take_over": True}, epoch=0)
    assert isinstance(welcome, m.Welcome)
    assert welcome.differences
    assert all(sentence.isprintable() for sentence in welcome.differences)
    refused = [
        say(crowd, ESCAPE, m.Hello, said, epoch=0),
        say(crowd, "x", m.Hello, said | {"instance": ESCAPE}, epoch=0),
        say(crowd, "x", m.Hello, said | {"oldest": 7, "protocol": 9}, epoch=0),
        say(crowd, f"new {role}", m.Hello, said | {"instance": "10"}, epoch=0),
    ]
    for answer in refused:
        assert isinstance(answer, m.Error)
        assert answer.text.isprintable()
    assert crowd.notes
    assert all(note.isprintable() for note in crowd.notes)


@pytest.mark.parametrize("cls", KEYED, ids=lambda cls: cls.__name__)
def test_nobody_speaks_under_the_name_of_another(crowd: Any, cls: type[m.Message]) -> None:
    moves = dict(crowd.state.meta.moves)
    for role in SENDERS[m.wire_name(cls)]:
        if role == "viewer":
            continue
        name, epoch = NAMES[role], crowd.epochs[NAMES[role]]
        crowd.state.clients[name].key = role
        stolen = say(crowd, name, cls, SOUND[cls], epoch=epoch, key="thief")
        assert (type(stolen), getattr(stolen, "code", "")) == (m.Error, "forbidden")
        for wrong in (0, epoch + 1, 2**62):
            guessed = say(crowd, name, cls, SOUND[cls], epoch=wrong, key=role)
            assert isinstance(guessed, m.Error)
            assert guessed.code in ("fenced", "not_joined")
    assert crowd.state.meta.moves == moves


def test_a_goodbye_under_the_name_of_another_lets_nobody_go(crowd: Any) -> None:
    crowd.state.clients["w"].key = "rollout"
    for how in ({"key": "thief"}, {"key": "rollout", "epoch": 0}, {"key": "rollout", "epoch": 2**62}):
        assert say(crowd, "w", m.Goodbye, {}, **how) == m.Ok()
    assert crowd.status["groups"]["leased"] == 1
    assert "w" in crowd.state.clients
