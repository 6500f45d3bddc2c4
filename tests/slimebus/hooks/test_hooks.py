import re
import subprocess
import sys
from pathlib import Path

import pytest

from slimebus.bus.errors import HookError
from slimebus.hooks import hooks


def test_a_hook_is_found_by_module_and_by_file(tmp_path: Path) -> None:
    (tmp_path / "plug.py").write_text("def double(x):\n    return 2 * x\n")
    assert hooks.load("plug.py:double", base=tmp_path)(4) == 8
    assert hooks.load(f"{tmp_path}/plug.py:double")(4) == 8
    assert hooks.load("os.path:join")("a", "b") == "a/b"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("plug", "expected pkg.module:name or file.py:name"),
        ("no_such_package:x", "cannot import no_such_package"),
        ("os.path:nothing", "os.path has no 'nothing'"),
        ("os:sep", "sep is a str, expected something callable"),
        ("absent.py:x", "no such file"),
    ],
)
def test_a_bad_hook_names_its_path_and_the_reason(path: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(HookError, match=message) as caught:
        hooks.load(path, base=tmp_path)
    assert path in caught.value.text


@pytest.mark.parametrize("path", ["strays.py:f", "strays:f"])
def test_a_hook_is_not_taken_from_the_working_directory(path: str, tmp_path: Path) -> None:
    (tmp_path / "strays.py").write_text("def f(response): pass\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.yaml").write_text(f"rollout: {{custom_rm_path: '{path}'}}\n")
    command = [sys.executable, "-m", "slimebus", "config", "check", "run/run.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert re.search(rf"rollout.custom_rm_path: hook '{path}': (no such file|cannot import)", done.stderr), done.stderr


def test_a_hook_may_be_a_module_of_the_runs_folder_and_import_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "neighbour_of_hook.py").write_text("TWO = 2\n")
    (tmp_path / "module_of_run.py").write_text("from neighbour_of_hook import TWO\ndef double(x): return TWO * x\n")
    monkeypatch.setattr("sys.path", [*sys.path])
    assert hooks.load("module_of_run:double", base=tmp_path)(4) == 8
    assert hooks.load("module_of_run.py:double", base=tmp_path)(4) == 8


@pytest.mark.parametrize("body", ["1/0", "import sys; sys.exit(1)", "def"])
def test_a_file_that_fails_when_loaded_is_named_with_its_line(body: str, tmp_path: Path) -> None:
    (tmp_path / "plug.py").write_text(f"x = 1\n{body}\n")
    with pytest.raises(HookError, match=r"plug.py failed when loaded, .*: (ZeroDivisionError|SystemExit|SyntaxError)") as caught:
        hooks.load("plug.py:x", base=tmp_path)
    assert "plug.py:2" in caught.value.text or "line 2" in caught.value.text
