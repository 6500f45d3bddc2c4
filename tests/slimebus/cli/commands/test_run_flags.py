"""Commands about a run find it by the same flags that named it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from command_tree import leaves
from slimebus_command import slimebus

from slimebus.bus.messages import SetReply
from slimebus.cli.commands import set as set_command
from slimebus.cli.root import root

OF_A_RUN = {
    name.removeprefix("slimebus "): command
    for name, command in leaves(root)
    if any(isinstance(p, click.Argument) and (p.name == "run_yaml" or "RUN.yaml" in (p.metavar or "")) for p in command.params)
}


@pytest.mark.parametrize("name", OF_A_RUN)
def test_a_command_that_takes_a_run_yaml_takes_the_flags_that_name_a_run(name: str) -> None:
    known = {word for p in OF_A_RUN[name].params for word in p.opts}
    assert {"--name", "--run-dir", "--keys"} <= known
    assert "--name" in CliRunner().invoke(root, [*name.split(), "--help"]).output


def test_many_commands_are_about_a_run() -> None:
    expected = {"broker", "trainer", "rollout", "up", "status", "set", "push", "eval", "trace", "export", "buffer ls", "buffer show"}
    assert expected <= set(OF_A_RUN)


def test_the_buffer_of_a_run_is_found_by_file_and_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("name: other\n")
    refused = CliRunner().invoke(root, ["buffer", "ls", "run.yaml", "--name", "mine"])
    assert "runs/mine" in str(refused.exception), refused.output


class Asked:
    """A broker that takes note of what it is asked."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}

    def call(self, message: Any, timeout_s: float) -> "Asked":
        self.settings = message.settings
        return self

    def expect(self, kind: type) -> SetReply:
        return SetReply(step=0, changed={}, settings={})


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (["max-staleness", "-1"], {"max_staleness": -1}),
        (["max-staleness", "-0.5"], {"max_staleness": -0.5}),
        (["max-staleness", "-inf"], {"max_staleness": float("-inf")}),
        (["--max-staleness", "4"], {"max_staleness": 4}),
        (["max-staleness=-1", "--timeout-s", "3"], {"max_staleness": -1}),
    ],
)
def test_a_negative_value_reaches_the_broker_which_says_what_is_wrong(
    words: list[str], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked()

    @contextmanager
    def visit(*given: Any, **how: Any) -> Iterator[Asked]:
        yield asked

    monkeypatch.setattr(set_command, "connect_without_joining", visit)
    done = CliRunner().invoke(root, ["set", *words])
    assert done.exit_code == 0, done.output
    assert asked.settings == settings


def test_what_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    done = slimebus("init", tmp_path / "no" / "run.yaml")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert done.stderr.startswith(f"slimebus: {tmp_path / 'no' / 'run.yaml'}: No such file or directory")
