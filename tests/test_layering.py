"""The arrows of the house: role -> slimebus -> third party, no torch where it must not be, no cycles, no work at import."""

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROLES = ("broker", "trainer", "rollout")
HEAVY = {"torch", "megatron", "transformers", "sglang"}


def imports(file: Path, *, top_only: bool = False) -> set[str]:
    """Full names of the modules a file imports; with top_only those imported when it is loaded."""
    tree = ast.parse(file.read_text())
    nodes = _loaded(tree) if top_only else ast.walk(tree)
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _loaded(tree: ast.Module) -> list[ast.stmt]:
    return [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def roots(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("file", sources("slimebus"), ids=lambda f: str(f.relative_to(ROOT)))
def test_slimebus_imports_no_role(file: Path) -> None:
    assert not roots(imports(file)) & set(ROLES)


@pytest.mark.parametrize("role", ROLES)
def test_roles_never_import_each_other(role: str) -> None:
    others = set(ROLES) - {role}
    bad = {str(f.relative_to(ROOT)): roots(imports(f)) & others for f in sources(role) if roots(imports(f)) & others}
    assert not bad


def test_the_broker_and_shared_code_are_free_of_torch() -> None:
    files = [f for f in sources("slimebus") + sources("broker") if "weights" not in f.parts]
    bad = [str(f.relative_to(ROOT)) for f in files if roots(imports(f)) & HEAVY]
    assert not bad


def test_commands_load_nothing_heavy() -> None:
    files = [
        f
        for package in ("slimebus", *ROLES)
        for f in sources(package)
        if f.name == "cli.py" or "commands" in f.parts or "config" in f.parts
    ]
    assert len(files) >= 8
    assert not [str(f.relative_to(ROOT)) for f in files if roots(imports(f)) & HEAVY]


PURE = {
    "collections",
    "contextlib",
    "difflib",
    "heapq",
    "itertools",
    "math",
    "statistics",
    "typing",
    "msgspec",
    "sortedcontainers",
    "xxhash",
}


def test_decisions_import_no_socket_disk_clock_or_random_source() -> None:
    files = [*sources("broker/state"), ROOT / "rollout/engines/engine_state.py"]
    assert len(files) > 20
    assert not {str(f.relative_to(ROOT)): found for f in files if (found := roots(imports(f)) - PURE - {"broker", "rollout", "slimebus"})}


ORDER = {
    "slimebus": [
        ["slimebus", "slimebus/bus", "slimebus/security", "slimebus/bus/transport", "slimebus/hooks", "slimebus/prompts"],
        ["slimebus/config", "slimebus/telemetry"],
        ["slimebus/weights", "slimebus/weights/codec", "slimebus/weights/store", "slimebus/weights/host", "slimebus/weights/pull"],
        ["slimebus/weights/files", "slimebus/client", "slimebus/view", "slimebus/process"],
        ["slimebus/cli/commands", "slimebus/sweep", "slimebus/cli"],
    ],
    "broker": [
        ["broker/state", "broker/source", "broker/store", "broker/inspect", "broker/page", "broker", "broker/simulate"],
    ],
    "rollout": [
        ["rollout/samples", "rollout/embedded", "rollout/engines/sglang", "rollout/engines", "rollout/weights", "rollout/endpoint"],
        ["rollout/rewards", "rollout/worker", "rollout"],
    ],
    "trainer": [
        ["trainer/batches", "trainer/compat", "trainer/objective", "trainer/algorithms", "trainer/corrections", "trainer/hf"],
        ["trainer/arguments", "trainer/launch", "trainer/model", "trainer/checkpoint", "trainer/publish", "trainer/session"],
        ["trainer/watch", "trainer", "trainer/critic"],
    ],
}
"""Every folder of a package, the lowest first: a module imports, when it is loaded, from its own folder and from those before it."""


def folder_of(name: str) -> str:
    """The folder of the module that an import names, or of the module that has this name."""
    path = name.replace(".", "/")
    while path and not (ROOT / f"{path}.py").is_file():
        if (ROOT / path / "__init__.py").is_file():
            return path
        path = path.rpartition("/")[0]
    return path.rpartition("/")[0]


@pytest.mark.parametrize("package", ORDER)
def test_folders_import_only_from_those_before_them(package: str) -> None:
    order = [folder for row in ORDER[package] for folder in row]
    packages = {str(f.parent.relative_to(ROOT)) for f in sources(package) if f.name == "__init__.py"}
    assert packages == set(order), "a folder without a place, or a place without a folder"
    bad = {
        f"{file.relative_to(ROOT)} -> {name}"
        for file in sources(package)
        if file.name != "__main__.py" and (folder := str(file.parent.relative_to(ROOT))) in order
        for name in imports(file, top_only=True)
        if (other := folder_of(name)) in order and order.index(other) > order.index(folder)
    }
    assert not bad


def test_modules_do_not_import_in_circles() -> None:
    modules = {}
    for package in ("slimebus", *ROLES):
        for file in sources(package):
            parts = file.relative_to(ROOT).with_suffix("").parts
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    graph = {name: (imports(file, top_only=True) & modules.keys()) - {name} for name, file in modules.items()}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"import cycle: {' -> '.join((*path[path.index(name) :], name))}"
        if name not in done:
            for other in graph[name]:
                visit(other, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


STARVED_NS = "open('/proc/self/schedstat').read().split()[1] if sys.platform == 'linux' else 0"
"""Nanoseconds that a process was ready to run and others had the CPU: what a loaded machine adds to its time."""


def commands() -> list[list[str]]:
    own = ["broker", "config", "config check", "config show", "eval", "export", "init", "rollout", "status", "trace", "trainer"]
    own += [
        "up",
        "try",
        "check-hooks",
        "sample",
        "keys",
        "keys add",
        "keys init",
        "keys ls",
        "keys revoke",
        "keys rotate",
        "buffer",
        "buffer ls",
        "buffer import",
    ]
    return [[], *(words.split() for words in own)]


def run_timed(code: str) -> tuple[str, float]:
    """What it prints, and its seconds but for those in which it waited for a CPU."""
    started = time.perf_counter()
    words = [sys.executable, "-c", f"import sys\ntry:\n {code}\nfinally: print('STARVED', {STARVED_NS})"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    text, _, starved = done.stdout.rpartition("STARVED")
    return text, time.perf_counter() - started - int(starved) / 1e9


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_help_is_instant_and_loads_no_torch(words: list[str]) -> None:
    """0.5 s; or, where others wear down the caches and the clock rate, four times what a bare `import asyncio` takes then (0.1 s)."""
    code = f"sys.argv[1:] = {[*words, '--help']!r}; from slimebus.cli.root import main\n"
    tries = []
    for _ in range(3):
        text, took_s = run_timed(f"{code} try: main()\n finally: print('LOADED', *sys.modules)")
        shown, _, loaded = text.rpartition("LOADED")
        assert "Usage: " in shown, text
        assert not set(loaded.split()) & HEAVY
        if took_s < 0.5 or took_s < 4 * run_timed("import asyncio")[1]:
            return
        tries.append(took_s)
    pytest.fail(f"--help took {min(tries):.2f} s at best of {len(tries)}; the bound is 0.5 s")
