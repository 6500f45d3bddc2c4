"""The weight socket lets in whom the broker lets in, and nobody else."""

import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from slimebus.bus.errors import SlimebusError, WeightsError
from slimebus.bus.messages import Keys, KeysReply
from slimebus.bus.transport.request import ReceivedReply
from slimebus.client import pull_keyring
from slimebus.client.pull_keyring import PullKeyring
from slimebus.security import key_folder
from slimebus.security.credentials import Credentials
from slimebus.security.key_file import KeyPair, read_key
from slimebus.security.keyring import FolderKeyring, rows_of
from slimebus.weights.pull.connection import with_key
from slimebus.weights.pull.puller import WeightPuller
from slimebus.weights.store.server import WeightServer
from slimebus.weights.store.version_store import VersionStore


class Broker:
    """A client whose broker tells the list that it read last."""

    def __init__(self, folder: Path) -> None:
        self.credentials, self.folder, self.num_asked, self.keys_generation = Credentials(folder / "trainer.key"), folder, 0, 0
        self.read()

    def read(self) -> None:
        self.keyring = FolderKeyring(self.folder)

    def call(self, message: Keys, *, timeout_s: float = 0.0) -> ReceivedReply:
        self.num_asked += 1
        generation = self.keyring.generation
        return ReceivedReply(KeysReply(generation=generation), [] if message.have == generation else [rows_of(self.keyring.grants)])

    def submit(self, message: Keys) -> Future[ReceivedReply]:
        future: Future[ReceivedReply] = Future()
        future.set_result(self.call(message))
        return future


class Served:
    """A weight server with the trainer's key, its list as the broker told it, and pullers to close."""

    def __init__(self, folder: Path, model) -> None:
        store = VersionStore(keep=4)
        store.publish(model)
        self.folder = folder
        self.broker = Broker(folder)
        self.keyring = PullKeyring(self.broker)
        self.server = WeightServer(store, keyring=self.keyring)
        self.address = with_key(self.server.endpoint, self.keyring.pair.public)
        self.pullers: list[WeightPuller] = []

    def tell(self) -> None:
        self.broker.read()
        deadline = time.monotonic() + 10
        while self.keyring.generation != self.broker.keyring.generation and time.monotonic() < deadline:
            time.sleep(0.01)

    def puller(self, pair: KeyPair | None, address: str = "") -> WeightPuller:
        self.pullers.append(WeightPuller([address or self.address], pair=pair, stall_s=0.3))
        return self.pullers[-1]

    def close(self) -> None:
        for puller in self.pullers:
            puller.close()
        self.server.close()


@pytest.fixture
def served(tmp_path, model):
    key_folder.init(tmp_path / "keys")
    key_folder.add(tmp_path / "keys", "viewer", "viewer")
    served = Served(tmp_path / "keys", model)
    yield served
    served.close()


def test_a_worker_key_pulls(served, model, check) -> None:
    check(served.puller(read_key(served.folder / "rollout.key").pair).pull(), model)


def test_without_a_key_the_address_says_that_one_is_needed(served) -> None:
    with pytest.raises(WeightsError, match="takes nobody without a key; give the folder of keys with --keys"):
        served.puller(None)
    with pytest.raises(WeightsError, match="takes nobody without a key"):
        served.puller(None, served.server.endpoint).pull(deadline_s=1.5)


def test_a_server_whose_heartbeats_tell_of_the_list_asks_when_it_has_changed_alone(served, monkeypatch) -> None:
    monkeypatch.setattr(pull_keyring, "ASK_EVERY_S", 0.0)
    served.broker.keys_generation = served.keyring.generation
    for _ in range(3):
        served.keyring.refresh()
    assert served.broker.num_asked == 1, "at its start"
    key_folder.revoke(served.folder, "rollout")
    served.broker.read()
    served.broker.keys_generation = served.broker.keyring.generation
    served.keyring.refresh()
    assert "rollout" not in {grant.name for grant in served.keyring.grants.values()}


def test_a_key_revoked_at_the_broker_is_cut_off_at_the_weights_too(served, model, check) -> None:
    puller = served.puller(read_key(served.folder / "rollout.key").pair)
    check(puller.pull(), model)
    key_folder.revoke(served.folder, "rollout")
    served.tell()
    with pytest.raises(SlimebusError, match="the key of this connection is revoked"):
        puller.pull(deadline_s=5)


def test_a_server_keeps_asking_whom_it_lets_in_until_it_is_closed(served, monkeypatch) -> None:
    monkeypatch.setattr("slimebus.client.pull_keyring.ASK_EVERY_S", 0.0)
    deadline = time.monotonic() + 20
    while served.broker.num_asked < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert served.broker.num_asked >= 4
    served.server.close()
    asked = served.broker.num_asked
    time.sleep(1.2)  # longer than the server takes from one question to the next
    assert served.broker.num_asked == asked
