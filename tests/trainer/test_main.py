"""What a trainer's process loads before it joins, and says when it is interrupted."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slimebus.config import resolve
from trainer import main
from trainer.main import Debugging, run_trainer
from trainer.session.broker_session import BrokerSession


def test_what_runs_before_the_broker_is_joined_needs_no_torch() -> None:
    code = """
import sys, trainer.main, trainer.checkpoint.folder
assert not {"torch", "megatron.core", "transformers"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], timeout=60)


@pytest.mark.parametrize("metrics", [{}, {"reward": 0.5}])
def test_an_interrupted_trainer_speaks_of_lost_steps_where_it_has_trained_any(
    metrics: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Session(BrokerSession):
        def __init__(self, *_: Any, **__: Any) -> None:
            self._metrics = metrics

        def close(self) -> None:
            pass

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "BrokerSession", Session)
    monkeypatch.setattr(main, "_train", interrupt)
    monkeypatch.setattr(main.logs, "set_up", lambda *_, **__: None)
    (tmp_path / "config.json").write_text("{}")
    resolved = resolve(None, {"run_dir": str(tmp_path), "model.hf_checkpoint": str(tmp_path)}, {})
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    run_trainer(resolved, None, Debugging(), take_over=False, debug=False)
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"  # rows are of ever new lengths
    assert ("interrupted without saving; the run goes on from step 0" in caplog.text) is bool(metrics)
