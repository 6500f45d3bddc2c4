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
        "--workers 1000000000000",
    ],
)
def test_absurd_numbers_are_refused_in_words(flags: str) -> None:
    done = CliRunner().invoke(simulate, ["--mean-length", "100", "--steps", "5", *flags.split()])
    assert isinstance(done.exception, SlimebusError), (done.output, done.exception)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--step-s 1e308", "--step-s is 1e+308; expected a number >= 0 and <= 1000000000.0"),
        ("--worker-tokens-per-s 1e-300", "--worker-tokens-per-s is 1e-300; expected a number >= 1e-06 and <= 1000000000000.0"),
        ("--steps 9999999", "--steps is 9999999; expected 1 to 78125, with 256 samples each"),
        ("--workers 999999", "--workers is 999999; expected 1 to 200000"),
        ("--length-sigma 11", "--length-sigma 11: expected 0 to 10"),
    ],
)
def test_what_is_refused_names_the_option_and_its_range(flags: str, message: str) -> None:
    done = CliRunner().invoke(simulate, ["--mean-length", "100", *flags.split()])
    assert message in str(done.exception)
