"""The parts of the simulation are imported as `simulation.*`."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))


@pytest.fixture(scope="session")
def base() -> int:
    """The first seed, from the hash of the commit; 0 outside a repository."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    return int(head[:6], 16) if head else 0
