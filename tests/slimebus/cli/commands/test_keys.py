from pathlib import Path

import pytest
from click.testing import CliRunner

from slimebus.bus.errors import UsageError
from slimebus.cli.root import root


@pytest.mark.parametrize("words", [["ls"], ["revoke", "x"], ["rotate", "x"], ["add", "x", "--role", "rollout"]], ids=lambda w: w[0])
def test_a_folder_that_is_not_there_is_named_with_the_way_to_make_it(words: list[str], tmp_path: Path) -> None:
    refused = CliRunner().invoke(root, ["keys", *words, "--keys", str(tmp_path / "keys")])
    assert isinstance(refused.exception, UsageError)
    assert refused.exception.text == (
        f"no folder of keys at {tmp_path}/keys; `slimebus keys init {tmp_path}/keys` makes one, --keys names another"
    )


def test_ls_shows_each_key_with_its_role_and_whether_it_is_let_in(tmp_path: Path) -> None:
    folder = str(tmp_path / "keys")
    guests = [["add", name, "--role", "viewer", "--days", days, "--keys", folder] for name, days in (("guest", "30"), ("gone", "1e-9"))]
    for words in (["init", folder], ["revoke", "client", "--keys", folder], *guests):
        assert CliRunner().invoke(root, ["keys", *words]).exit_code == 0
    rows = [line.split() for line in CliRunner().invoke(root, ["keys", "ls", "--keys", folder]).output.splitlines()]
    assert [row[0] for row in rows] == ["broker", "trainer", "rollout", "client", "guest", "gone"]
    assert [" ".join(row[3:]) for row in rows[4:]] == ["ends in 30.0 days", "has ended"]
    assert (rows[1][1], len(rows[1][2]), rows[3][-1]) == ("trainer", 40, "revoked")
