"""Nothing that comes from the wire, the disk or the config is unpickled or evaluated: no source calls what could."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("slimebus", "broker", "rollout", "trainer", "configs", "bin")
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle", "joblib"}
CALLS = {"eval", "exec", "__import__"}
ATTRIBUTES = {("yaml", "load"), ("yaml", "unsafe_load"), ("yaml", "full_load"), ("torch", "load"), ("numpy", "load"), ("np", "load")}
PYOBJ = {"recv_pyobj", "send_pyobj"}


def found_in(source: str) -> list[str]:
    """What a source imports or calls that turns bytes into code or objects of any class."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            found.append(str(node.module))
        elif isinstance(node, ast.Call):
            found += _call(node)
    return found


def _call(node: ast.Call) -> list[str]:
    function = node.func
    if isinstance(function, ast.Name) and function.id in CALLS:
        return [function.id]
    if isinstance(function, ast.Attribute):
        owner = function.value.id if isinstance(function.value, ast.Name) else ""
        is_harmless = _says(node, "weights_only", True) or (owner in ("np", "numpy") and not _says(node, "allow_pickle", True))
        if function.attr in PYOBJ or ((owner, function.attr) in ATTRIBUTES and not is_harmless):
            return [f"{owner}.{function.attr}"]
    return []


def _says(node: ast.Call, name: str, value: bool) -> bool:
    return any(k.arg == name and isinstance(k.value, ast.Constant) and k.value.value is value for k in node.keywords)


SOURCES = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_source_unpickles_or_evaluates(file: Path) -> None:
    assert not found_in(file.read_text())


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import marshal, shelve",
        "eval(x)",
        "exec(x)",
        "yaml.load(x)",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "np.load(f, allow_pickle=True)",
        "socket.recv_pyobj()",
    ],
)
def test_each_way_to_do_it_would_be_found(line: str) -> None:
    assert found_in(line)


def test_what_only_looks_like_it_is_left_alone() -> None:
    assert not found_in("model.eval()\nyaml.safe_load(x)\ntorch.load(f, weights_only=True)\nnp.load(f)\nmsgspec.json.decode(x)")
