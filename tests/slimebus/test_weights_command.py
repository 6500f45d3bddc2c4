"""The weights command on directories and files."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from slimebus.commands.weights import weights
from slimebus.weights.disk_chain import DiskChain
from slimebus.weights.safetensors_file import read_model, write_model
from slimebus.weights.store import VersionStore
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


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    for name, seed in (("a", 0), ("b", 8)):
        write_model(tmp_path / name, model(seed))
        (tmp_path / name / "config.json").write_text("{}")
    return tmp_path / "a", tmp_path / "b"


def test_diff_counts_values_steps_and_layers(pair: tuple[Path, Path]) -> None:
    found = json.loads(run("diff", *pair, "--json").stdout)
    assert (found["values"], found["changed"]) == (8192, 512)
    assert found["steps"]["1"] == 512
    assert found["layers"]["model.layers.1"]["density"] == 0.25
    assert found["layers"]["model.layers.0"]["bytes"] < 300
    assert found["bytes"]["full"] == 16384
    text = run("diff", *pair).stdout
    assert "512 of 8192 values changed (6.25%)" in text
    assert "model.layers.1" in text


def test_a_written_delta_applies_and_verifies(pair: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = pair
    file, out = tmp_path / "ab.delta", tmp_path / "out"
    assert f"wrote {file}" in run("diff", a, b, "--out", file).stdout
    run("apply", a, file, out)
    assert np.array_equal(read_model(out)[LAYERS[3]].buffer, read_model(b)[LAYERS[3]].buffer)
    assert (out / "config.json").is_file()
    digest = run("verify", out).stdout.split()[-1]
    assert run("verify", b, "--digest", digest).exit_code == 0
    assert digest in run("verify", file, "--base", a).stdout


def test_verify_says_what_is_wrong_with_exit_code_1(pair: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = pair
    file = tmp_path / "ab.delta"
    run("diff", a, b, "--out", file)
    assert "the digest is" in run("verify", a, "--digest", "00", code=1).stderr
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    assert "does not have the bytes that its manifest says" in run("verify", file, code=1).stderr


def test_float32_checkpoints_are_compared_as_they_are_published(tmp_path: Path) -> None:
    for name, shift in (("a", 0.0), ("b", 1e-6)):
        values = np.linspace(1, 2, 1000, dtype=np.float32) + np.float32(shift)
        write_model(tmp_path / name, {"w": as_tensor("w", values)})
    assert json.loads(run("diff", tmp_path / "a", tmp_path / "b", "--json").stdout)["density"] > 0.9
    assert json.loads(run("diff", tmp_path / "a", tmp_path / "b", "--bf16", "--json").stdout)["density"] < 0.1


def test_a_chain_is_listed_and_verified_to_its_newest_version(tmp_path: Path) -> None:
    store, chain = VersionStore(lineage="L"), DiskChain(tmp_path, "L")
    for seed in range(4):
        store.publish({name: (t.dtype, t.shape, t.buffer) for name, t in model(seed).items()})
        chain.publish(store)
    rows = json.loads(run("ls", chain.folder, "--json").stdout)
    assert [(row["version"], row["kind"]) for row in rows] == [(0, "full"), (1, "delta"), (2, "delta"), (3, "delta")]
    assert rows[1]["changed"] == 64
    assert store.newest.digest in run("verify", chain.folder).stdout
    (chain.folder / "000002.delta").unlink()
    assert "000002.delta is missing" in run("verify", chain.folder, code=1).stderr


def test_tensors_are_listed_with_form_size_and_hash(pair: tuple[Path, Path]) -> None:
    lines = run("ls", pair[0]).stdout.splitlines()
    assert len(lines) == len(LAYERS)
    assert "bfloat16  64x32" in lines[0]


def test_a_path_that_holds_no_weights_says_what_was_expected(tmp_path: Path) -> None:
    shutil.copyfile(__file__, tmp_path / "x.delta")
    result = CliRunner().invoke(weights, ["ls", str(tmp_path / "x.delta")])
    assert "not a slimebus delta file" in str(result.exception)
    result = CliRunner().invoke(weights, ["ls", str(tmp_path)])
    assert "is it a Hugging Face model directory?" in str(result.exception)
