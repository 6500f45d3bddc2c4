"""Words of a command line."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from slimebus.cli.commands.engines import drain
from slimebus.cli.commands.status import status
from slimebus.config.flags import split_words


@pytest.mark.parametrize("words", [("run.yaml", "http://x:1"), ("http://x:1", "run.yaml")])
def test_the_run_yaml_may_stand_first_or_last(words: tuple[str, ...]) -> None:
    assert split_words(words) == (Path("run.yaml"), ("http://x:1",))


@pytest.mark.parametrize("seconds", ["nan", "-5", "inf"])
def test_a_wait_that_is_no_time_is_refused(seconds: str) -> None:
    refused = CliRunner().invoke(status, ["--timeout-s", seconds])
    assert refused.exit_code == 2
    assert "expected seconds, from 0 to 86400" in refused.output


@pytest.mark.parametrize(("given", "flag"), [("--trainer.dump_samples", "--dump-samples"), ("--broker.max-staleness", "--max-staleness")])
def test_a_field_by_its_dotted_name_is_told_its_flag(given: str, flag: str) -> None:
    refused = CliRunner().invoke(status, [given, "3"])
    assert refused.exit_code == 2
    assert f"No such option '{given}'. Did you mean '{flag}'?" in refused.output


def test_the_flag_of_a_field_that_a_command_does_not_take_is_not_named() -> None:
    assert "Did you mean" not in CliRunner().invoke(drain, ["--trainer.dump_samples", "3"]).output
    assert "Did you mean '--keys'?" in CliRunner().invoke(drain, ["--security.keys", "k"]).output
