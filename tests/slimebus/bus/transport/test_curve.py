"""Real sockets with keys: who is let in, what each may ask for, and what those who are not let in are told."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from answering import Answering, polite
from waiting import wait_until

from slimebus.bus import envelope
from slimebus.bus import messages as m
from slimebus.bus.errors import SlimebusError, Unreachable
from slimebus.bus.transport import curve
from slimebus.bus.transport.client import Client
from slimebus.bus.transport.server import Limits
from slimebus.security import key_folder
from slimebus.security.credentials import Credentials
from slimebus.security.keyring import FolderKeyring


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    key_folder.init(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def serve(closing: Any) -> Callable[..., Answering]:
    """Serves with the keys of a folder; None: without."""

    def make(folder: Path | None, bind: str = "tcp://127.0.0.1:0", **options: Any) -> Answering:
        return closing(Answering(polite, bind, keyring=FolderKeyring(folder) if folder else None, **options))  # type: ignore[no-any-return]

    return make


@pytest.fixture
def connect(closing: Any) -> Callable[..., Client]:
    def make(address: str, key: Path | None, name: str = "w1") -> Client:
        credentials = Credentials(key) if key else None
        return closing(Client(address, name=name, credentials=credentials, resend_s=0.3), goodbye=False)  # type: ignore[no-any-return]

    return make


def test_an_allowed_key_is_let_in_and_its_name_comes_with_each_message(folder: Path, serve: Any, connect: Any) -> None:
    server = serve(folder)
    client = connect(server.server.endpoint, folder / "rollout.key")
    assert client.join("rollout", timeout_s=5).epoch == 7
    client.call(m.Lease(want=1, wait_s=0), [b"x" * 100_000], timeout_s=5)
    assert {request.key for request in server.seen} == {"rollout"}
    assert client.refusal == ""


def test_without_a_key_there_is_no_way_in_and_the_error_says_so(folder: Path, serve: Any, connect: Any) -> None:
    client = connect(serve(folder).server.endpoint, None)
    with pytest.raises(Unreachable, match="takes nobody without a key; give the folder of this machine's key with --keys"):
        client.call(m.Status(), timeout_s=1.0)


def test_a_key_that_is_not_on_the_list_is_refused_and_told_how_to_get_on_it(folder: Path, serve: Any, connect: Any) -> None:
    server = serve(folder)
    key_folder.revoke(folder, "client")
    server.server.keyring.refresh()
    client = connect(server.server.endpoint, folder / "client.key")
    with pytest.raises(Unreachable, match=r"refused our key .*client.key: it is not on its allow-list, or revoked"):
        client.call(m.Status(), timeout_s=1.0)
    assert server.server.refused["unknown_key"] > 0


def test_a_broker_with_another_key_than_expected_is_not_spoken_to(tmp_path: Path, folder: Path, serve: Any, connect: Any) -> None:
    key_folder.init(tmp_path / "other")
    server = serve(tmp_path / "other")
    client = connect(server.server.endpoint, folder / "rollout.key")
    with pytest.raises(Unreachable, match=r"has another key than .*rollout.key expects"):
        client.call(m.Status(), timeout_s=1.0)
    assert server.seen == []


def test_a_client_with_a_key_does_not_speak_in_the_clear(folder: Path, serve: Any, connect: Any) -> None:
    server = serve(None)
    client = connect(server.server.endpoint, folder / "rollout.key")
    with pytest.raises(Unreachable, match="serves without keys"):
        client.call(m.Status(), timeout_s=1.0)
    assert server.seen == []


@pytest.mark.parametrize(
    ("key", "message", "why"),
    [
        ("rollout", m.Commit(step=0), "key 'rollout' has the role rollout, which may not send 'commit'"),
        ("rollout", m.Hello(role="trainer", instance="i"), "may not join as 'trainer'"),
        ("viewer", m.Hello(role="client", instance="i"), "may not send 'hello'"),
        ("consumer", m.Commit(step=0), "may not send 'commit'"),
    ],
)
def test_a_key_may_ask_for_no_more_than_its_role(folder: Path, serve: Any, connect: Any, key: str, message: m.Message, why: str) -> None:
    for role in ("viewer", "consumer"):
        key_folder.add(folder, role, role)
    server = serve(folder)
    client = connect(server.server.endpoint, folder / f"{key}.key")
    with pytest.raises(SlimebusError, match=why) as refused:
        client.call(message, timeout_s=5)
    assert (refused.value.code, server.seen) == ("forbidden", [])
    assert isinstance(client.call(m.Status(), timeout_s=5).message, m.Ok), "every role may look"


def test_a_key_bound_to_a_name_speaks_under_no_other(folder: Path, serve: Any, connect: Any) -> None:
    key_folder.add(folder, "node1", "rollout", client="w1")
    address = serve(folder).server.endpoint
    assert connect(address, folder / "node1.key", "w1").join("rollout", timeout_s=5)
    with pytest.raises(SlimebusError, match="key 'node1' may speak as 'w1' only, not as 'w2'") as refused:
        connect(address, folder / "node1.key", "w2").join("rollout", timeout_s=5)
    assert refused.value.code == "forbidden"


def test_a_socket_identity_of_someone_else_does_not_lend_its_rights(folder: Path, serve: Any, connect: Any) -> None:
    """The key of the connection counts, in every message: not the identity that the ROUTER knows it by."""
    server = serve(folder)
    trainer = connect(server.server.endpoint, folder / "trainer.key", "trainer")
    trainer.join("trainer", timeout_s=5)
    stolen = server.seen[-1].peer
    thief = Credentials(folder / "rollout.key")
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.setsockopt(zmq.IDENTITY, stolen)
        socket.curve_serverkey, socket.curve_publickey = thief.server.encode(), thief.pair.public.encode()
        socket.curve_secretkey = thief.pair.secret.encode()
        socket.connect(server.server.endpoint)
        socket.send(envelope.encode(m.Commit(step=0), id=1, run="r1", sender="trainer", epoch=7))
        assert socket.poll(5000)
        answer = envelope.decode(socket.recv_multipart()).message
    assert isinstance(answer, m.Error)
    assert answer.code == "forbidden"


def test_a_revoked_key_is_cut_off_at_its_next_message_without_a_restart(folder: Path, serve: Any, connect: Any) -> None:
    server = serve(folder)
    client = connect(server.server.endpoint, folder / "rollout.key")
    client.join("rollout", timeout_s=5)
    key_folder.revoke(folder, "rollout")
    wait_until("key to go", lambda: "rollout" not in {held.name for held in server.server.keyring.grants.values()}, 5)
    with pytest.raises(SlimebusError, match="the key of this connection is revoked") as refused:
        client.call(m.Lease(want=1, wait_s=0), timeout_s=5)
    assert refused.value.code == "forbidden"


def test_a_key_added_while_the_server_runs_is_let_in(folder: Path, serve: Any, connect: Any) -> None:
    server = serve(folder)
    late = key_folder.add(folder, "late", "rollout")
    assert connect(server.server.endpoint, late).join("rollout", timeout_s=10), "a client that came too early is let in when it may"


def test_a_rotated_key_is_taken_up_by_a_process_that_runs(folder: Path, serve: Any, connect: Any) -> None:
    server = serve(folder)
    client = connect(server.server.endpoint, folder / "rollout.key")
    client.join("rollout", timeout_s=5)
    older = client.credentials.pair.public
    key_folder.rotate(folder, "rollout", grace_s=0)
    wait_until("key to go", lambda: older not in server.server.keyring.grants, 5)
    assert isinstance(client.call(m.Lease(want=1, wait_s=0), timeout_s=10).message, m.Ok)
    assert client.credentials.pair.public != older


def test_a_rotated_key_is_let_in_for_its_grace(folder: Path, serve: Any, connect: Any, tmp_path: Path) -> None:
    older = tmp_path / "older.key"
    older.write_bytes((folder / "rollout.key").read_bytes())
    older.chmod(0o600)
    key_folder.rotate(folder, "rollout", grace_s=60)
    server = serve(folder)
    assert connect(server.server.endpoint, older).join("rollout", timeout_s=5)
    server.server.keyring._wall = lambda: time.time() + 61
    wait_until("new key", lambda: len(server.server.keyring.grants) == 3, 5)
    with pytest.raises(Unreachable, match="refused our key"):
        connect(server.server.endpoint, older, "w2").join("rollout", timeout_s=1)


def test_the_servers_key_is_rotated_while_connections_stay_and_new_ones_come(folder: Path, serve: Any, connect: Any) -> None:
    server = serve(folder)
    client = connect(server.server.endpoint, folder / "rollout.key")
    client.join("rollout", timeout_s=5)
    key_folder.prepare_broker(folder)
    prepared = connect(server.server.endpoint, folder / "trainer.key", "trainer")
    prepared.join("trainer", timeout_s=5)
    key_folder.switch_broker(folder)
    older = server.server.keyring.pair
    wait_until("new pair", lambda: server.server.keyring.pair != older, 5)
    server.todo.append(server.server.renew_key)
    wait_until("rest", lambda: not server.todo)
    for open_connection in (client, prepared):
        assert isinstance(open_connection.call(m.Status(), timeout_s=5).message, m.Ok), "an open connection stays"
    assert connect(server.server.endpoint, folder / "client.key", "c").call(m.Status(), timeout_s=5)


def test_a_list_that_does_not_parse_changes_nothing_and_is_named(folder: Path, serve: Any, connect: Any) -> None:
    server = serve(folder)
    (folder / "allowed.json").write_text('{"clients": {')
    wait_until("problem", lambda: server.server.keyring.problem, 5)
    assert "allowed.json: not an allow-list" in server.server.keyring.problem
    assert connect(server.server.endpoint, folder / "rollout.key").join("rollout", timeout_s=5)


def test_who_asks_to_come_in_is_counted_however_late_it_came(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve(None)
    authenticator, open_then, decided = server.server.authenticator, list[int](), threading.Event()
    count, decide = authenticator._count, authenticator._decide
    with zmq.Context() as context, context.socket(zmq.DEALER) as late:
        late.linger = 0

        def count_and_be_late() -> None:
            count()
            if not open_then:  # it comes in between the count and the look at who asks
                open_then.append(authenticator.num_connections)
                late.connect(server.server.endpoint)
                assert authenticator._zap.poll(5000)

        def look_and_decide(asked: list[bytes]) -> list[bytes]:
            open_then.append(authenticator.num_connections)
            decided.set()
            return decide(asked)

        monkeypatch.setattr(authenticator, "_decide", look_and_decide)
        monkeypatch.setattr(authenticator, "_count", count_and_be_late)
        assert decided.wait(10)
    assert open_then[-1] == open_then[0] + 1


def test_a_connection_that_asks_before_its_event_comes_is_counted_too(serve: Any, connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve(None, limits=Limits(max_connections=1))
    read, looks = curve.handshakes, [0]

    def handshakes_late(monitor: Any) -> list[tuple[int, int]]:
        looks[0] += 1
        return read(monitor) if looks[0] % 8 == 0 else []

    monkeypatch.setattr("slimebus.bus.transport.authenticator.handshakes", handshakes_late)
    assert isinstance(connect(server.server.endpoint, None, "first").call(m.Status(), timeout_s=5).message, m.Ok)
    with pytest.raises(Unreachable, match="no room for another connection"):
        connect(server.server.endpoint, None, "second").call(m.Status(), timeout_s=1.0)


def test_connections_beyond_the_bound_are_refused_and_those_inside_still_work(serve: Any, connect: Any) -> None:
    server = serve(None, limits=Limits(max_connections=8))
    client = connect(server.server.endpoint, None)
    client.join("rollout", timeout_s=5)
    with zmq.Context() as context:
        crowd = [context.socket(zmq.DEALER) for _ in range(40)]
        for i, socket in enumerate(crowd):
            socket.linger = 0
            socket.connect(server.server.endpoint)
            socket.send(envelope.encode(m.Status(), id=1, sender="me"))
            assert i >= 7 or socket.poll(5000), "the first seven have room"
        wait_until("refusal of 30", lambda: server.server.refused["max_connections"] >= 30)
        late = connect(server.server.endpoint, None, "late")
        with pytest.raises(Unreachable, match=r"no room for another connection \(broker.max_clients\)"):
            late.call(m.Status(), timeout_s=1.0)
        assert isinstance(client.call(m.Status(), timeout_s=5).message, m.Ok)
        for socket in crowd:
            socket.close()
    assert isinstance(late.call(m.Status(), timeout_s=10).message, m.Ok), "there is room again"


def test_connections_that_say_nothing_keep_nobody_out(serve: Any, connect: Any) -> None:
    server = serve(None, limits=Limits(max_connections=8))
    address = ("127.0.0.1", int(server.server.endpoint.rpartition(":")[2]))
    with contextlib.ExitStack() as silent:
        for _ in range(40):
            silent.enter_context(socket.create_connection(address))
        wait_until("the silent ones", lambda: server.server.authenticator.num_connections >= 40)
        assert connect(server.server.endpoint, None).join("rollout", timeout_s=5)
        assert server.server.bounds()["max_connections"] == {"limit": 8, "used": 1, "hits": 0}


def test_a_connection_takes_its_place_for_as_long_as_it_stands(serve: Any, connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server, later = serve(None, limits=Limits(max_connections=2)), [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + later[0])
    monkeypatch.setattr("slimebus.bus.transport.authenticator.time", clock)
    inside = [connect(server.server.endpoint, None, f"c{i}") for i in range(2)]
    for client in inside:
        assert isinstance(client.call(m.Status(), timeout_s=5).message, m.Ok)
    later[0] += 100.0
    with pytest.raises(Unreachable, match="no room for another connection"):
        connect(server.server.endpoint, None, "late").call(m.Status(), timeout_s=1.0)
    assert server.server.bounds()["max_connections"]["used"] == 2
