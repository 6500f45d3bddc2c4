"""What the runs of real processes share."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(Path(__file__).parent))  # the tests here import live_run and raw_cast


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the quick start's tiny model, tokenizer and prompts; made once."""
    folder = tmp_path_factory.mktemp("task")
    subprocess.run([sys.executable, str(ROOT / "configs/quickstart/make.py"), "--out", str(folder)], check=True, timeout=120)
    return folder
