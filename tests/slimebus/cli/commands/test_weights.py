"""The weights command on directories and files."""

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from delta_files import between
from model_files import write_model

from slimebus.cli.commands.weights import weights
from slimebus.cli.root import main
from slimebus.weights.files import delta_file, stored_weights
from slimebus.weights.files.disk_chain import DiskChain
from slimebus.weights.host.safetensors_file import as_weights
from slimebus.weights.store.version_store import VersionStore
from slimebus.weights.tensors import Tensor, as_tensor

LAYERS = ("model.embed.weight", "model.layers.0.up.weight", "model.layers.0.down.weight", "model.layers.1.up.weight")


def run(*words: Any, code: int = 0) -> Result:
    result = CliRunner().invoke(weights, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return result


def model(seed: int) -> dict[str, Tensor]:
    rng = np.random.default_rng(0)
    made = {name: rng.integers(0x3C00, 0x4000, (64, 32)).astype(np.uint16) for name in LAYERS}
    made["model.layers.1.up.weight"][:, :seed] += np.uint16(1)
    return {name: as_tensor(name, value) for name, value in made.items()}


def test_a_model_and_a_delta_file_are_verified_and_what_is_wrong_is_told_with_exit_code_1(tmp_path: Path) -> None:
    base, target = (as_weights(model(seed), version=seed) for seed in (0, 8))
    write_model(tmp_path / "b", model(8))
    assert target.digest in run("verify", tmp_path / "b", "--digest", target.digest).stdout
    assert f"the digest is {target.digest}, expected 00" in run("verify", tmp_path / "b", "--digest", "00", code=1).stderr
    file = tmp_path / "ab.delta"
    delta_file.write(file, *between(base, target))
    assert target.digest in run("verify", file).stdout
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    assert "does not have the bytes that its manifest says" in run("verify", file, code=1).stderr


def test_a_chain_is_verified_to_its_newest_version(tmp_path: Path) -> None:
    store, chain = VersionStore(lineage="L"), DiskChain(tmp_path, "L")
    for seed in range(4):
        newest = store.publish({name: (t.dtype, t.shape, t.buffer) for name, t in model(seed).items()})
        chain.write(store)
        chain.announce(newest.version, newest.digest)
    assert newest.digest in run("verify", chain.folder).stdout
    write_model(tmp_path / "newest", model(3))
    run("verify", tmp_path / "newest", "--digest", newest.digest)
    newest_delta = chain.folder / "000003-0.delta"
    newest_delta.write_bytes(newest_delta.read_bytes()[:-1] + b"!")
    (chain.folder / "000002-0.delta").unlink()
    said = run("verify", chain.folder, code=1).stderr
    assert "000002-0.delta is missing" in said
    assert "000003-0.delta: tensor" in said, "one problem does not hide the next"
    (chain.folder / "latest.json").unlink()
    assert "no latest.json" in run("verify", chain.folder, code=1).stderr


def test_a_path_that_holds_no_weights_says_what_was_expected(tmp_path: Path) -> None:
    shutil.copyfile(__file__, tmp_path / "x.delta")
    assert "not a slimebus delta file" in run("verify", tmp_path / "x.delta", code=1).stderr
    assert "is it a Hugging Face model directory?" in run("verify", tmp_path, code=1).stderr


def test_a_float32_model_counts_as_it_is_published(tmp_path: Path) -> None:
    """With bits below those of bfloat16."""
    wide = {name: ((t.steps.astype(np.uint32) << 16) + np.uint32(77)).view(np.float32).reshape(t.shape) for name, t in model(0).items()}
    write_model(tmp_path / "a", {name: as_tensor(name, values) for name, values in wide.items()})
    run("verify", tmp_path / "a", "--digest", as_weights(model(0)).digest)


def test_what_cannot_be_read_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(stored_weights, "verify", refused)
    monkeypatch.setattr(sys, "argv", ["slimebus", "weights", "verify", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, capsys.readouterr().err) == (2, f"slimebus: {tmp_path}: Permission denied\n")
