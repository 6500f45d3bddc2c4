"""What command a real SGLang server is started with."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import rollout
from rollout.engines.sglang.process import option_list, sglang_server
from slimebus.process.process_guard import GUARD_PATH

ROOT = Path(rollout.__file__).parent


def test_options_become_arguments_in_order():
    options = {"tp_size": 2, "enable-metrics": True, "disable-radix-cache": False, "dtype": None, "cuda-graph-bs": [1, 2]}
    assert option_list(options) == ("--tp-size", "2", "--enable-metrics", "--cuda-graph-bs", "1", "2")


def test_on_cpu_the_flags_and_the_shim_are_applied_and_the_callers_arguments_win(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    server = sglang_server("/model", tmp_path / "log", port=4000, python="/py", arguments=("--max-running-requests", "4"), on_cpu=True)
    command = server.command
    assert command[command.index("/py") :][:4] == ["/py", "-m", "sglang.launch_server", "--model-path"]
    assert command[command.index("--device") + 1] == "cpu"
    assert "--sleep-on-idle" in command
    assert command[-2:] == ["--max-running-requests", "4"]
    assert server.url == "http://127.0.0.1:4000"
    assert server.environment["SGLANG_USE_CPU_ENGINE"] == "1"
    assert server.environment["PYTHONPATH"] == f"{ROOT / 'engines/sglang/cpu_shim'}:/elsewhere"


def test_with_cuda_only_the_dtype_that_is_published_is_added(tmp_path: Path):
    server = sglang_server("/model", tmp_path / "log", port=4000, arguments=("--tp-size", "8"), on_cpu=False)
    assert "--device" not in server.command
    assert server.command[server.command.index("--dtype") + 1 :] == ["bfloat16", "--tp-size", "8"]
    assert "SGLANG_USE_CPU_ENGINE" not in server.environment


def test_the_shim_and_the_guard_need_only_the_standard_library_to_be_imported():
    for file in (ROOT / "engines/sglang/cpu_shim/sitecustomize.py", Path(GUARD_PATH)):
        imported = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
        modules = [[node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names] for node in imported]
        assert {module.split(".")[0] for of_one in modules for module in of_one} <= sys.stdlib_module_names
