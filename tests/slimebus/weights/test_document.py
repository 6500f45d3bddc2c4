"""The example of docs/weights.md runs."""

import runpy
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

DOCUMENT = Path(__file__).parents[3] / "docs" / "weights.md"


def test_a_model_is_published_and_pulled_as_the_document_shows(tmp_path: Path) -> None:
    example = tmp_path / "example.py"
    example.write_text(DOCUMENT.read_text().split("```python\n")[1].partition("```")[0])
    ran = runpy.run_path(str(example), {"torch": torch, "model": torch.nn.Linear(4, 2)})
    ran["puller"].close()
    ran["server"].close()
    assert ran["weights"].tensors["weight"].shape == (2, 4)
    assert ran["newer"] is ran["weights"]
