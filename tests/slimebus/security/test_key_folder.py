"""The folder of keys: what is written, who can read it, what changes and what is refused."""

import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from slimebus.bus.errors import UsageError
from slimebus.config import resolve
from slimebus.security import key_folder
from slimebus.security.allow_list import grants_of, read_allow_list
from slimebus.security.credentials import credentials_at, credentials_of
from slimebus.security.exposure import check_bind, insecure_note, is_local
from slimebus.security.key_file import read_key
from slimebus.security.keyring import FolderKeyring, grants_from, rows_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    key_folder.init(tmp_path / "keys")
    return tmp_path / "keys"


def test_secrets_are_readable_by_their_owner_alone_and_public_parts_stand_apart(folder: Path) -> None:
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == {
        "broker.key": 0o600,
        "trainer.key": 0o600,
        "rollout.key": 0o600,
        "client.key": 0o600,
        "broker.pub": 0o644,
        "allowed.json": 0o644,
    }
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    secrets = [read_key(path).secret for path in folder.glob("*.key")]
    public = (folder / "allowed.json").read_text() + (folder / "broker.pub").read_text()
    assert not [secret for secret in secrets if secret in public]
    assert len(set(secrets)) == 4


def test_a_client_key_file_has_all_that_its_machine_needs(folder: Path) -> None:
    key = credentials_at(folder, "rollout")
    assert (key.key.name, key.key.role) == ("rollout", "rollout")
    assert key.server == (folder / "broker.pub").read_text().strip() == read_key(folder / "broker.key").public


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("trainer", "trainer"), "has a key 'trainer' already"),
        (("broker", "trainer"), "key name 'broker'"),
        (("../x", "trainer"), "key name '../x'"),
        (("x", "king"), "role 'king'; expected one of"),
    ],
)
def test_what_cannot_be_added_is_named(folder: Path, words: tuple[str, str], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        key_folder.add(folder, *words)


def test_init_never_overwrites_keys(folder: Path) -> None:
    with pytest.raises(UsageError, match="has keys already"):
        key_folder.init(folder)


def test_a_public_key_from_elsewhere_is_let_in_without_a_file(folder: Path, tmp_path: Path) -> None:
    key_folder.init(tmp_path / "other")
    public = read_key(tmp_path / "other" / "rollout.key").public
    assert key_folder.add(folder, "far", "rollout", public=public) is None
    assert FolderKeyring(folder).grants[public].name == "far"
    with pytest.raises(UsageError, match="public key 'short'"):
        key_folder.add(folder, "other", "rollout", public="short")
    with pytest.raises(UsageError, match="under another name"):
        key_folder.add(folder, "again", "rollout", public=public)


def test_revoked_keys_grant_nothing_and_their_name_can_be_used_again(folder: Path) -> None:
    older = read_key(folder / "rollout.key").public
    key_folder.revoke(folder, "rollout")
    assert older not in FolderKeyring(folder).grants
    with pytest.raises(UsageError, match="no key 'rollout' to change; there are: trainer, client"):
        key_folder.revoke(folder, "rollout")
    key_folder.add(folder, "rollout", "rollout")
    assert older not in FolderKeyring(folder).grants


def test_a_rotated_key_is_good_until_its_grace_is_over(folder: Path) -> None:
    older = read_key(folder / "rollout.key").public
    key_folder.rotate(folder, "rollout", grace_s=100)
    allowed = read_allow_list(folder / "allowed.json")
    newer = read_key(folder / "rollout.key").public
    assert {older, newer} <= grants_of(allowed, time.time()).keys()
    assert older not in grants_of(allowed, time.time() + 101)


def test_a_key_with_an_end_grants_nothing_from_then_on_and_its_name_can_be_used_again(folder: Path) -> None:
    end = time.time() + 100.0
    key_folder.add(folder, "guest", "viewer", until=end)
    guest, now = read_key(folder / "guest.key").public, [end - 1.0]
    ring = FolderKeyring(folder, wall=lambda: now[0])
    generation = ring.generation
    assert guest in ring.grants
    now[0] = end
    ring.refresh()
    assert guest not in ring.grants
    assert ring.generation > generation, "who follows the list hears of it"
    key_folder.add(folder, "late", "viewer", until=time.time() - 1.0)
    with pytest.raises(UsageError, match="no key 'late' to change"):
        key_folder.rotate(folder, "late", grace_s=0)
    key_folder.add(folder, "late", "viewer")
    assert read_key(folder / "late.key").public in FolderKeyring(folder).grants


def test_the_brokers_key_changes_in_two_steps(folder: Path) -> None:
    present = read_key(folder / "broker.key").public
    key_folder.prepare_broker(folder)
    key_folder.prepare_broker(folder)
    assert read_key(folder / "broker.key").public == present
    _, upcoming = read_key(folder / "trainer.key").broker
    late = key_folder.add(folder, "late", "rollout")
    assert late is not None
    assert read_key(late).broker == [present, upcoming]
    key_folder.switch_broker(folder)
    assert read_key(folder / "broker.key").public == upcoming == (folder / "broker.pub").read_text().strip()
    assert read_key(folder / "trainer.key").broker == [upcoming]


def test_a_key_is_found_by_role_and_of_two_of_one_role_a_file_is_named(folder: Path, tmp_path: Path) -> None:
    copies = tmp_path / "node"
    copies.mkdir()
    for name in ("n1", "n2"):
        key = key_folder.add(folder, name, "rollout")
        assert key is not None
        (copies / key.name).write_bytes(key.read_bytes())
        (copies / key.name).chmod(0o600)
    with pytest.raises(UsageError, match=r"has 2 keys of role rollout; choose one with --keys .*/NAME.key"):
        credentials_at(copies, "rollout")
    assert credentials_at(copies / "n1.key", "rollout").key.name == "n1"
    assert credentials_at(folder, "rollout").key.name == "rollout", "the one that is called like its role"
    with pytest.raises(UsageError, match="has no key of role trainer; make one"):
        credentials_at(copies, "trainer")
    with pytest.raises(UsageError, match="is not the key of a client"):
        credentials_at(folder / "broker.key", "rollout")


def test_keys_of_a_file_are_relative_to_it_and_of_a_flag_to_where_we_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder.parent / "run.yaml"
    file.write_text("security: {keys: keys}\n")
    found = credentials_of(resolve(file, environ={}).keys_path, "trainer")
    assert found is not None
    assert found.key.name == "trainer"
    monkeypatch.chdir(folder)
    assert resolve(file, {"security.keys": "."}, environ={}).keys_path == Path(".")
    assert resolve(None, environ={"SLIMEBUS_SECURITY_KEYS": "x"}).keys_path == Path("x")
    assert credentials_of(resolve(None, environ={}).keys_path, "trainer") is None


def test_a_list_travels_to_the_trainer_unchanged(folder: Path) -> None:
    grants = FolderKeyring(folder).grants
    assert grants_from(rows_of(grants)) == grants


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:1", "tcp://127.8.8.8:1", "tcp://localhost:1", "tcp://[::1]:1", "ipc:///x", "inproc://x"]
)
def test_what_only_this_machine_can_reach_needs_no_keys(address: str) -> None:
    assert is_local(address)
    check_bind(address, "broker.bind", has_keys=False, insecure=False)
    assert insecure_note(address) == ""


@pytest.mark.parametrize(
    "address",
    [
        "tcp://0.0.0.0:1",
        "tcp://*:1",
        "tcp://[::]:1",
        "tcp://10.0.0.1:1",
        "tcp://host:1",
        "tcp://eth0:1",
        "tcp://[fe80::1%eth0]:1",
    ],
)
def test_what_others_can_reach_needs_keys_or_insecure(address: str) -> None:
    with pytest.raises(UsageError, match="can be reached from other machines, and there are no keys"):
        check_bind(address, "broker.bind", has_keys=False, insecure=False)
    check_bind(address, "broker.bind", has_keys=True, insecure=False)
    check_bind(address, "broker.bind", has_keys=False, insecure=True)
    assert insecure_note(address).startswith("INSECURE")


@pytest.mark.parametrize(
    "address", ["ws://127.0.0.1:1", "localhost:5555", "http://127.0.0.1:1", "tcp://127.0.0.1:99999", "tcp://127.0.0.1", "foo", ""]
)
def test_what_is_no_address_is_said_to_be_none(address: str) -> None:
    with pytest.raises(UsageError, match=r"broker.bind is '.*'; expected tcp://HOST:PORT with a port of 0 to 65535"):
        check_bind(address, "broker.bind", has_keys=False, insecure=True)


def test_a_key_that_is_added_while_another_is_revoked_brings_that_one_not_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has_read, goes_on = threading.Event(), threading.Event()
    check = key_folder._check_new

    def check_slowly(*arguments: Any) -> None:
        has_read.set()
        assert goes_on.wait(30)
        check(*arguments)

    monkeypatch.setattr(key_folder, "_check_new", check_slowly)
    adding = threading.Thread(target=key_folder.add, args=(folder, "node7", "rollout"))
    revoking = threading.Thread(target=key_folder.revoke, args=(folder, "rollout"))
    adding.start()
    assert has_read.wait(30)
    revoking.start()
    revoking.join(0.5)  # it ends here unless it waits for the other
    goes_on.set()
    adding.join(30)
    revoking.join(30)
    allowed = read_allow_list(folder / "allowed.json").clients
    assert allowed["rollout"].revoked
    assert not allowed["node7"].revoked
