"""What bin/install may install is what the tests ran with."""

import re
from pathlib import Path

BIN = Path(__file__).parents[2] / "bin"


def pinned(text: str) -> set[tuple[str, str]]:
    return {(re.sub(r"[-_.]+", "-", name).lower(), version) for name, version in re.findall(r"^([\w.-]+)==([^\s\\]+)", text, re.MULTILINE)}


def test_every_package_but_torch_has_hashes_at_the_version_of_the_constraints() -> None:
    hashes = (BIN / "hashes.txt").read_text()
    wanted = pinned((BIN / "constraints.txt").read_text())
    assert {(name, version) for name, version in wanted if name != "torch"} == pinned(hashes), "write bin/hashes.txt with bin/lock"
    for part in re.split(r"^(?=[\w.-]+==)", hashes, flags=re.MULTILINE)[1:]:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", part), part[:60]
