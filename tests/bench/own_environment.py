"""Scripts that need another project's packages run in an environment of their own beside bin/, made when it is missing or outdated."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def made_environment(name: str) -> Path:
    """The Python of .venv-NAME, made first where there is none that fits bin/requirements-NAME.txt; words about it go to stderr."""
    venv, requirements = ROOT / f".venv-{name}", ROOT / "bin" / f"requirements-{name}.txt"
    python, stamp = venv / "bin" / "python", venv / requirements.name
    if not stamp.is_file() or stamp.read_text() != requirements.read_text():
        print(f"installing {requirements.name} into {venv} (once)", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", venv], check=True, stdout=sys.stderr)
        subprocess.run([python, "-m", "pip", "install", "-q", "-r", requirements], check=True, stdout=sys.stderr)
        stamp.write_text(requirements.read_text())
    return python


def enter_environment(name: str) -> None:
    """Go on in .venv-NAME."""
    if Path(sys.prefix).resolve() != (ROOT / f".venv-{name}").resolve():
        python = made_environment(name)
        os.execv(python, [str(python), *sys.argv])
