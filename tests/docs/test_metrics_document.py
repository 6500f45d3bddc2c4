"""Every metric that docs/metrics.md names is one that the code has."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMPOSED = re.compile(r"sync_(wire|verify|share|load)_s|weights_\w+")
"""Names that the code puts together from parts."""


def test_every_documented_metric_is_made_by_the_code() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text().partition("## Trainer")[2].partition("## The run")[0]  # of that: tests/broker/page
    named = {name for row in re.findall(r"^\| (`[^|]+) \|", text, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert len(named) > 35
    files = [file for role in ("slimebus", "broker", "rollout", "trainer") for file in (ROOT / role).rglob("*.py")]
    code = "\n".join(file.read_text() for file in files)
    missing = {name for name in named if not re.search(rf"\b{name}\b", code) and not COMPOSED.fullmatch(name)}
    assert not missing
