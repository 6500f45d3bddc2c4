"""A `slimebus` command as a person at a shell gives it."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)]), "OMP_NUM_THREADS": "1"}
"""Of any process that a test starts: it imports slimebus, the roles and what is beside this file."""


def slimebus(*words: object, stdin: bytes = b"", **environment: str) -> "subprocess.CompletedProcess[str]":
    """What it says, and the code it ends with, within a minute."""
    command = [sys.executable, "-m", "slimebus", *map(str, words)]
    done = subprocess.run(command, input=stdin, capture_output=True, timeout=60, env=ENVIRONMENT | environment, cwd=ROOT, check=False)
    return subprocess.CompletedProcess(command, done.returncode, done.stdout.decode(), done.stderr.decode())
