"""Words of a command line."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from slimebus.cli.commands.status import status
from slimebus.cli.config.flags import split_words


@pytest.mark.parametrize("words", [("run.yaml", "http://x:1"), ("http://x:1", "run.yaml")])
def test_the_run_yaml_may_stand_first_or_last(words: tuple[str, ...]) -> None:
    assert split_words(words) == (Path("run.yaml"), ("http://x:1",))


@pytest.mark.parametrize("seconds", ["nan", "-5", "inf"])
def test_a_wait_that_is_no_time_is_refused(seconds: str) -> None:
    refused = CliRunner().invoke(status, ["--timeout-s", seconds])
    assert refused.exit_code == 2
    assert "expected seconds, from 0 to 86400" in refused.output
