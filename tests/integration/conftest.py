"""What the runs of real processes share."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the quick start's tiny model, tokenizer and prompts; made once."""
    folder = tmp_path_factory.mktemp("task")
    subprocess.run([sys.executable, str(ROOT / "configs/quickstart/make.py"), "--out", str(folder)], check=True, timeout=120)
    return folder
