from pathlib import Path

import pytest

from slimebus import hooks
from slimebus.errors import HookError


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
