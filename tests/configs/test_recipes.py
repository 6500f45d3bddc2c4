"""Every run.yaml that ships is valid, and its hooks can be imported. Sweeps are tested where they are read."""

from pathlib import Path

import pytest

from slimebus.config import resolve
from slimebus.hooks import hooks

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FILES = sorted(file for file in CONFIGS.rglob("*.yaml") if "\nsweep_dir:" not in file.read_text())


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(CONFIGS)))
def test_config_is_valid(file: Path) -> None:
    resolved = resolve(file, environ={})
    assert resolved.config.name != "run"


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(CONFIGS)))
def test_hooks_can_be_imported(file: Path) -> None:
    resolved = resolve(file, environ={})
    rollout = resolved.config.rollout
    for path in (rollout.custom_rm_path, rollout.custom_generate_function_path, rollout.dynamic_sampling_filter_path):
        assert not path or callable(hooks.load(path, base=resolved.base))


@pytest.mark.parametrize("folder", sorted({f.parent for f in FILES}), ids=lambda f: f.name)
def test_recipe_has_a_readme_that_names_its_run(folder: Path) -> None:
    assert "run.yaml" in (folder / "README.md").read_text()
