"""`slimebus eval` of a run."""

from typing import Any

import pytest
from click.testing import CliRunner

from slimebus.bus.errors import SlimebusError
from slimebus.cli.commands import evaluate
from slimebus.cli.root import root

ROW: dict[str, Any] = {"dataset": "held", "version": 3, "mean_reward": None, "low": None, "high": None}
ROW |= {"pass_at": {}, "num_samples": 0, "num_failed": 0}


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("no worker is left to evaluate", "no worker is left to evaluate"),
        ("", "every sample failed; the log above, or that of the workers, says why"),
    ],
)
def test_an_evaluation_without_a_score_fails_with_its_reason(reason: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "_evaluate_there", lambda *asked: [ROW | {"reason": reason}])
    done = CliRunner().invoke(root, ["eval", "--broker", "tcp://127.0.0.1:1"])
    assert "no score" in done.output
    assert isinstance(done.exception, SlimebusError)
    assert done.exception.text == said
