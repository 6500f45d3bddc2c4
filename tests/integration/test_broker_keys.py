"""A live broker with keys: names belong to keys, revoking works everywhere, the trainer learns the list, hints are for those inside."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.shell import Broker
from broker.source import FileRows, FileSource
from broker.state.rules import Rules
from broker.store import MemoryStore
from slimebus import messages as m
from slimebus.errors import SlimebusError
from slimebus.security import key_folder
from slimebus.security.credentials import Credentials
from slimebus.security.keyring import FolderKeyring
from slimebus.transport.client import Client

pytestmark = pytest.mark.integration


class Live:
    """A broker thread with the keys of a folder, and clients to close."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "keys"
        key_folder.init(self.folder)
        key_folder.add(self.folder, "node2", "rollout")
        (folder / "p.jsonl").write_text("".join(f'{{"prompt": "{i}"}}\n' for i in range(100)))
        rules = Rules(batch_size=2, max_staleness=float("inf"), lease_s=600, client_timeout_s=600)
        self.rows = FileRows([str(folder / "p.jsonl")])
        self.broker = Broker(rules, FileSource(self.rows), MemoryStore(), run="r", keyring=FolderKeyring(self.folder))
        self.clients: list[Client] = []
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.broker.run, args=(self.stop,))
        self.thread.start()

    def client(self, key: str, name: str) -> Client:
        self.clients.append(Client(self.broker.endpoint, name=name, credentials=Credentials(self.folder / f"{key}.key"), resend_s=0.5))
        return self.clients[-1]

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(bytes(self.client("client", "watcher").call(m.Status(), timeout_s=10).bulk[0]))
        return found

    def close(self) -> None:
        for client in self.clients:
            client.close(goodbye=False)
        self.stop.set()
        self.thread.join(10)
        self.rows.close()


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    one = Live(tmp_path)
    yield one
    one.close()


def _wait_until(is_true: Callable[[], Any], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert is_true()


def test_a_name_belongs_to_the_key_that_joined_under_it(live: Live) -> None:
    owner, other = live.client("rollout", "w1"), live.client("node2", "w1")
    owner.join("rollout", timeout_s=10)
    with pytest.raises(SlimebusError, match="the name 'w1' belongs to the key 'rollout' while its process is alive") as refused:
        other.join("rollout", timeout_s=10)
    assert refused.value.code == "forbidden"
    other.run, other.epoch = owner.run, owner.epoch
    for message in (m.Lease(want=1, wait_s=0), m.Heartbeat()):
        with pytest.raises(SlimebusError, match="'w1' joined with another key than 'node2'"):
            other.call(message, timeout_s=10)
    other.call(m.Goodbye(), timeout_s=10)
    assert isinstance(owner.call(m.Heartbeat(), timeout_s=10).message, m.HeartbeatReply), "a goodbye in its name did nothing"


def test_the_holder_of_a_revoked_key_is_out_and_its_groups_are_queued_again(live: Live) -> None:
    worker = live.client("node2", "w2")
    worker.join("rollout", timeout_s=10)
    leased = worker.call(m.Lease(want=3, wait_s=5, needs_weights=False), timeout_s=10).message
    assert isinstance(leased, m.LeaseReply)
    parked = live.client("node2", "w3")
    parked.join("rollout", timeout_s=10)
    waiting = parked.submit(m.Lease(want=1, wait_s=600), timeout_s=600)
    _wait_until(lambda: len(live.status()["parked"]) == 1)
    key_folder.revoke(live.folder, "node2")
    _wait_until(lambda: not [c for c in live.status()["clients"] if c["role"] == "rollout"])
    status = live.status()
    assert (status["groups"]["leased"], status["groups"]["queued"], status["parked"]) == (0, len(leased.groups), [])
    waiting.cancel()


def test_a_trainer_learns_the_allow_list_and_its_changes(live: Live) -> None:
    trainer = live.client("trainer", "t")
    trainer.join("trainer", timeout_s=10)
    first = trainer.call(m.Keys(), timeout_s=10)
    assert isinstance(first.message, m.KeysReply)
    assert sorted(name for _, name, _ in json.loads(bytes(first.bulk[0]))) == ["client", "node2", "rollout", "trainer"]
    again = trainer.call(m.Keys(have=first.message.generation), timeout_s=10)
    assert len(again.bulk) == 0
    key_folder.revoke(live.folder, "node2")
    _wait_until(lambda: trainer.call(m.Keys(have=first.message.generation), timeout_s=10).bulk)


def test_hints_reach_keys_that_are_allowed_and_stop_when_they_are_revoked(live: Live) -> None:
    heard: dict[str, list[m.Hint]] = {"rollout": [], "node2": []}
    welcome = None
    for key, hints in heard.items():
        client = live.client(key, f"listener-{key}")
        welcome = client.join("rollout", timeout_s=10)
        client.listen(welcome.hints, hints.append)
    plain = Client(live.broker.endpoint, name="plain")
    strange: list[m.Hint] = []
    assert welcome is not None
    plain.listen(welcome.hints, strange.append)
    live.clients.append(plain)
    trainer = live.client("trainer", "t")
    trainer.join("trainer", timeout_s=10)
    trainer.call(m.Resume(step=0, version=0, lineage="L"), timeout_s=10)
    trainer.call(m.Publish(lineage="L", version=0, publishers=["x"]), timeout_s=10)
    _wait_until(lambda: heard["rollout"] and heard["node2"])
    key_folder.revoke(live.folder, "node2")
    _wait_until(lambda: not [c for c in live.status()["clients"] if c["name"] == "listener-node2"])
    time.sleep(1.0)
    before = {key: len(hints) for key, hints in heard.items()}
    trainer.call(m.Publish(lineage="L", version=0, publishers=["y"]), timeout_s=10)
    _wait_until(lambda: len(heard["rollout"]) > before["rollout"])
    assert len(heard["node2"]) == before["node2"], "the revoked one hears no more"
    assert strange == []


def test_the_status_says_how_the_door_is_kept(live: Live) -> None:
    assert live.status()["security"] == {"transport": "curve", "keys": 4, "problem": ""}
    (live.folder / "allowed.json").write_text("nonsense")
    _wait_until(lambda: "allowed.json: not an allow-list" in live.status()["security"]["problem"])
