"""A live broker with keys: names belong to keys, revoking works everywhere, the trainer learns the list, hints are for those inside."""

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_broker import LiveBroker
from scripted import begin, publish
from waiting import wait_until

from slimebus.bus import messages as m
from slimebus.bus.errors import SlimebusError
from slimebus.bus.transport.client import Client
from slimebus.security import key_folder
from slimebus.security.credentials import Credentials
from slimebus.view.run_status import ask_status

pytestmark = pytest.mark.integration


class Live(LiveBroker):
    """One with the keys of a folder."""

    def __init__(self, folder: Path) -> None:
        self.keys = folder / "keys"
        key_folder.init(self.keys)
        key_folder.add(self.keys, "node2", "rollout")
        broker, rollout = {"max_staleness": math.inf, "lease_s": 600}, {"rollout_batch_size": 2}
        super().__init__(folder, broker=broker, rollout=rollout, security={"keys": str(self.keys)})

    def with_key(self, key: str, name: str, role: str = "") -> Client:
        return self.client(name, role, credentials=Credentials(self.keys / f"{key}.key"))

    def status(self) -> dict[str, Any]:
        return ask_status(self.with_key("client", "watcher"), timeout_s=60)


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    with Live(tmp_path) as one:
        yield one


def test_a_name_belongs_to_the_key_that_joined_under_it(live: Live) -> None:
    owner, other = live.with_key("rollout", "w1"), live.with_key("node2", "w1")
    owner.join("rollout", timeout_s=60)
    with pytest.raises(SlimebusError, match="the name 'w1' belongs to the key 'rollout' while its process is alive") as refused:
        other.join("rollout", timeout_s=60)
    assert refused.value.code == "forbidden"
    other.run, other.epoch = owner.run, owner.epoch
    for message in (m.Lease(want=1, wait_s=0), m.Heartbeat()):
        with pytest.raises(SlimebusError, match="'w1' joined with another key than 'node2'"):
            other.call(message, timeout_s=60)
    other.call(m.Goodbye(), timeout_s=60)
    assert isinstance(owner.call(m.Heartbeat(), timeout_s=60).message, m.HeartbeatReply), "a goodbye in its name did nothing"


def test_a_workers_key_keeps_no_trainer_out(live: Live) -> None:
    squatter, trainer = live.with_key("rollout", "trainer"), live.with_key("trainer", "trainer")
    squatter.join("rollout", timeout_s=60)
    squatter.call(m.Heartbeat(), timeout_s=60)
    trainer.join("trainer", timeout_s=60)
    assert trainer.call(m.Resume(step=0, version=0, lineage="L"), timeout_s=60).message == m.Ok()
    with pytest.raises(SlimebusError, match="joined with another key") as refused:
        squatter.call(m.Heartbeat(), timeout_s=60)
    assert refused.value.code == "forbidden"


def test_the_holder_of_a_revoked_key_is_out_and_its_groups_are_queued_again(live: Live) -> None:
    worker = live.with_key("node2", "w2", "rollout")
    leased = worker.call(m.Lease(want=3, wait_s=5, needs_weights=False), timeout_s=60).message
    assert isinstance(leased, m.LeaseReply)
    parked = live.with_key("node2", "w3", "rollout")
    waiting = parked.submit(m.Lease(want=1, wait_s=600), timeout_s=600)
    wait_until("parked request", lambda: len(live.status()["parked"]) == 1)
    key_folder.revoke(live.keys, "node2")
    wait_until("end of the workers", lambda: not [c for c in live.status()["clients"] if c["role"] == "rollout"])
    status = live.status()
    assert (status["groups"]["leased"], status["groups"]["queued"], status["parked"]) == (0, len(leased.groups), [])
    waiting.cancel()


def test_a_trainer_learns_the_allow_list_and_its_changes(live: Live) -> None:
    trainer = live.with_key("trainer", "t", "trainer")
    first = trainer.call(m.Keys(), timeout_s=60)
    assert isinstance(first.message, m.KeysReply)
    assert sorted(name for _, name, _ in json.loads(bytes(first.bulk[0]))) == ["client", "node2", "rollout", "trainer"]
    again = trainer.call(m.Keys(have=first.message.generation), timeout_s=60)
    assert len(again.bulk) == 0
    key_folder.revoke(live.keys, "node2")
    wait_until("new list", lambda: trainer.call(m.Keys(have=first.message.generation), timeout_s=60).bulk)


def test_hints_reach_keys_that_are_allowed_and_stop_when_they_are_revoked(live: Live) -> None:
    heard: dict[str, list[m.Hint]] = {"rollout": [], "node2": []}
    welcome = None
    for key, hints in heard.items():
        client = live.with_key(key, f"listener-{key}")
        welcome = client.join("rollout", timeout_s=60)
        client.listen(welcome.hints, hints.append)
    plain = Client(live.address, name="plain")
    strange: list[m.Hint] = []
    assert welcome is not None
    plain.listen(welcome.hints, strange.append)
    live.clients.append(plain)
    trainer = live.with_key("trainer", "t", "trainer")
    begin(trainer)
    wait_until("hint for both", lambda: heard["rollout"] and heard["node2"])
    key_folder.revoke(live.keys, "node2")
    wait_until("end of it", lambda: not [c for c in live.status()["clients"] if c["name"] == "listener-node2"])
    time.sleep(1.0)
    before = {key: len(hints) for key, hints in heard.items()}
    publish(trainer, 0, address="tcp://127.0.0.1:2")
    wait_until("hint", lambda: len(heard["rollout"]) > before["rollout"])
    assert len(heard["node2"]) == before["node2"], "the revoked one hears no more"
    assert strange == []


def test_the_status_says_how_the_door_is_kept(live: Live) -> None:
    assert live.status()["security"] == {"transport": "curve", "keys": 4, "problem": ""}
    (live.keys / "allowed.json").write_text("nonsense")
    wait_until("complaint", lambda: "allowed.json: not an allow-list" in live.status()["security"]["problem"])
