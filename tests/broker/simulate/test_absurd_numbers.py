"""Numbers that no run has are refused in words, and at once."""

import pytest
from click.testing import CliRunner

from broker.simulate.cli import simulate
from slimebus.bus.errors import SlimebusError


@pytest.mark.parametrize(
    "flags",
    [
        "--step-s inf",
        "--publish-s inf",
        "--overhead-s inf",
        "--step-s nan",
        "--max-staleness nan",
        "--mean-length nan",
        "--mean-length inf",
        "--max-length nan",
        "--length-sigma nan",
        "--length-sigma inf",
        "--samples 1000000000",
        "--steps 1000000000",
        "--over-sampling 1000000000000",
        "--workers 1000000000000",
        "--life-s 1e-9",
        "--step-s 1e12 --life-s 1000",
    ],
)
def test_absurd_numbers_are_refused_in_words(flags: str) -> None:
    done = CliRunner().invoke(simulate, ["--mean-length", "100", "--steps", "5", *flags.split()])
    assert isinstance(done.exception, SlimebusError), (done.output, done.exception)
