"""Every file of a run or a sweep that ships is valid, and its hooks can be imported."""

from pathlib import Path

import pytest

from slimebus.cli import hooks
from slimebus.cli.config import resolve
from slimebus.sweep import plan

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SWEEPS = sorted(file for file in CONFIGS.rglob("*.yaml") if "\nsweep_dir:" in file.read_text())
FILES = sorted(set(CONFIGS.rglob("*.yaml")) - set(SWEEPS))


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(CONFIGS)))
def test_config_is_valid(file: Path) -> None:
    resolved = resolve(file, environ={})
    assert resolved.config.name != "run"


@pytest.mark.parametrize("file", SWEEPS, ids=lambda f: str(f.relative_to(CONFIGS)))
def test_each_trial_of_a_sweep_is_valid(file: Path) -> None:
    assert plan.load(file).trials


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(CONFIGS)))
def test_hooks_can_be_imported(file: Path) -> None:
    resolved = resolve(file, environ={})
    rollout = resolved.config.rollout
    for path in (rollout.custom_rm_path, rollout.custom_generate_function_path, rollout.dynamic_sampling_filter_path):
        assert not path or callable(hooks.load(path, base=resolved.base))


@pytest.mark.parametrize("folder", sorted({f.parent for f in FILES}), ids=lambda f: f.name)
def test_recipe_has_a_readme_that_names_its_run(folder: Path) -> None:
    assert "run.yaml" in (folder / "README.md").read_text()
