"""What the runs of real processes share."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the quick start's tiny model, tokenizer and prompts; made once."""
    folder = tmp_path_factory.mktemp("task")
    subprocess.run([sys.executable, str(ROOT / "configs/quickstart/make.py"), "--out", str(folder)], check=True, timeout=120)
    return folder


@pytest.fixture(scope="session")
def even_task(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The task with a model that two stages share: without its last layer."""
    folder = tmp_path_factory.mktemp("even") / "task"
    shutil.copytree(task, folder)
    config = json.loads((folder / "model/config.json").read_text())
    layers = config["num_hidden_layers"] = config["num_hidden_layers"] - 1
    (folder / "model/config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model/model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if f"layers.{layers}." not in name}
    save_file(kept, folder / "model/model.safetensors", metadata={"format": "pt"})
    return folder
