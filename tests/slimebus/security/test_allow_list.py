"""The allow-list: a wrong one is refused by name, and a broker that runs keeps the one before."""

import json
from pathlib import Path

import pytest

from slimebus.bus.errors import UsageError
from slimebus.security import key_folder
from slimebus.security.keyring import FolderKeyring


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    key_folder.init(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not an allow-list"),
        ('{"clients": {"a": {"role": "king", "public": "x"}}}', "a: role 'king'"),
        ('{"clients": {"a": {"role": "rollout", "public": "x"}}}', "a: 'x' is not a public key"),
    ],
)
def test_a_wrong_allow_list_is_named_and_a_broker_that_runs_keeps_the_one_before(folder: Path, text: str, why: str) -> None:
    keyring = FolderKeyring(folder)
    before = keyring.grants
    (folder / "allowed.json").write_text(text)
    keyring.refresh()
    assert (keyring.grants, why in keyring.problem) == (before, True)
    with pytest.raises(UsageError, match=why):
        FolderKeyring(folder)
    (folder / "allowed.json").unlink()
    keyring.refresh()
    assert (keyring.grants, "no such allow-list" in keyring.problem) == (before, True)


def test_one_public_key_under_two_names_is_refused(folder: Path) -> None:
    tree = json.loads((folder / "allowed.json").read_text())
    tree["clients"]["copy"] = tree["clients"]["rollout"]
    (folder / "allowed.json").write_text(json.dumps(tree))
    with pytest.raises(UsageError, match="have the same public key; give each its own"):
        FolderKeyring(folder)
