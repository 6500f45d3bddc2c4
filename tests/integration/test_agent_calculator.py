"""The recipe configs/agent-calculator, short but whole: from rewards alone a model learns to ask a tool."""

import sys
from pathlib import Path

import pytest
import yaml
from live_run import ROOT, Run

from slimebus.view import report

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

RECIPE = ROOT / "configs" / "agent-calculator"
SHORT = {"sft.yaml": 100, "run.yaml": 20}


def write(folder: Path, name: str) -> Path:
    """The recipe's file with all it reads and writes in `folder`, and fewer steps."""
    text = (RECIPE / name).read_text().replace("../../runs/agent-calculator", str(folder))
    tree = yaml.safe_load(text)
    tree["broker"]["bind"] = "tcp://127.0.0.1:0"
    tree["rollout"]["num_rollout"] = SHORT[name]
    tree["rollout"]["custom_generate_function_path"] = str(RECIPE / tree["rollout"]["custom_generate_function_path"])
    tree["optimizer"]["lr_decay_iters"] = SHORT[name]
    if "eval" in tree:
        tree["eval"]["eval_interval"] = SHORT[name]
    else:
        tree["weights"]["update_weights_interval"] = SHORT[name]
    file = folder / name
    file.write_text(yaml.safe_dump(tree))
    return file


def test_a_model_learns_to_ask_the_calculator(tmp_path: Path, task: Path) -> None:
    with Run(tmp_path, task) as run:
        made = run.command("make", [sys.executable, str(RECIPE / "make.py"), "--out", str(tmp_path / "task")])
        made.ends(0)
        for name in SHORT:
            stage = run.command(name, [sys.executable, "-m", "slimebus", "up", str(write(tmp_path, name))])
            stage.ends(0, 300)
        rows = report.read_report(tmp_path / "rl").evaluations("heldout")
        assert [row["version"] for row in rows] == [0, SHORT["run.yaml"]]
        before, after = (row["mean_reward"] for row in rows)
        assert after > before + 0.3, (before, after)
