from pathlib import Path

import pytest
from click.testing import CliRunner

from broker.process import build
from slimebus.commands.config import check
from slimebus.config import resolve
from slimebus.errors import ConfigError

DEMONSTRATIONS = """
rollout: {custom_generate_function_path: "solve.py:solve"}
engine: {engine: ENGINE}
eval: {datasets: {held: {path: held.jsonl}}}
"""


def run_yaml(tmp_path: Path, engine: str) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(DEMONSTRATIONS.replace("ENGINE", engine))
    return file


def test_a_run_without_engines_that_is_to_be_evaluated_is_refused(tmp_path: Path) -> None:
    """It would wait for its evaluations for ever."""
    file = run_yaml(tmp_path, "none")
    with pytest.raises(ConfigError, match=r"eval.datasets held need an engine .* engine.engine is none; set engine.engine"):
        build(resolve(file, environ={}))
    refused = CliRunner().invoke(check, [str(file)])
    assert isinstance(refused.exception, ConfigError)


def test_a_worker_without_an_engine_may_join_a_run_that_is_evaluated(tmp_path: Path) -> None:
    file = run_yaml(tmp_path, "cpu")
    assert CliRunner().invoke(check, [str(file)]).exit_code == 0
    assert resolve(file, {"engine.engine": "none"}, environ={}).config.eval.datasets
