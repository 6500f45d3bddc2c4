"""Words of a command line."""

from pathlib import Path

import pytest

from slimebus.cli.config.flags import split_words


@pytest.mark.parametrize("words", [("run.yaml", "http://x:1"), ("http://x:1", "run.yaml")])
def test_the_run_yaml_may_stand_first_or_last(words: tuple[str, ...]) -> None:
    assert split_words(words) == (Path("run.yaml"), ("http://x:1",))
