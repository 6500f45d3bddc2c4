"""The weights command on directories and files."""

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from delta_files import write_between

from slimebus.cli.commands.weights import weights
from slimebus.cli.root import main
from slimebus.weights.files import stored_weights
from slimebus.weights.files.disk_chain import DiskChain
from slimebus.weights.host.safetensors_file import as_weights, read_model, write_model
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


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    for name, seed in (("a", 0), ("b", 8)):
        write_model(tmp_path / name, model(seed))
        (tmp_path / name / "config.json").write_text("{}")
    return tmp_path / "a", tmp_path / "b"


def test_a_written_delta_applies_and_verifies(pair: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = pair
    file, out = tmp_path / "ab.delta", tmp_path / "out"
    run("apply", a, write_between(a, b, file), out)
    assert np.array_equal(read_model(out)[LAYERS[3]].buffer, read_model(b)[LAYERS[3]].buffer)
    assert (out / "config.json").is_file()
    digest = run("verify", out).stdout.split()[-1]
    assert run("verify", b, "--digest", digest).exit_code == 0
    assert digest in run("verify", file, "--base", a).stdout


def test_verify_says_what_is_wrong_with_exit_code_1(pair: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = pair
    file = tmp_path / "ab.delta"
    write_between(a, b, file)
    assert "the digest is" in run("verify", a, "--digest", "00", code=1).stderr
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


def wide(tensors: dict[str, Tensor], noise: int = 0) -> dict[str, Tensor]:
    """The same as float32, with bits below those of bfloat16."""
    return {
        name: as_tensor(name, ((t.steps.astype(np.uint32) << 16) + np.uint32(noise)).view(np.float32).reshape(t.shape))
        for name, t in tensors.items()
    }


def test_a_delta_of_a_float32_directory_is_good_and_applies_to_it(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 8)):
        write_model(tmp_path / name, wide(model(seed), noise=77))
    write_between(tmp_path / "a", tmp_path / "b", tmp_path / "x.delta")
    run("verify", tmp_path / "x.delta", "--base", tmp_path / "a")
    run("apply", tmp_path / "a", tmp_path / "x.delta", tmp_path / "again")
    digests = [run("verify", tmp_path / name).stdout.split()[-1] for name in ("b", "again")]
    assert digests[0] == digests[1]
    assert {tensor.dtype for tensor in read_model(tmp_path / "again").values()} == {"bfloat16"}


def test_applying_again_over_what_is_there_gives_the_same_and_a_failure_leaves_it(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    delta, out = tmp_path / "x.delta", tmp_path / "out"
    write_between(a, b, delta)
    first = [run("apply", a, delta, out).stdout for _ in range(2)]
    assert first[0] == first[1]
    before = (out / "model.safetensors").read_bytes()

    def fails(source: Any, target: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fails)
        result = CliRunner().invoke(weights, ["apply", str(a), str(delta), str(out)])
    assert "No space left on device" in str(result.exception)
    assert (out / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]


def told(words: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of the whole command on a mistake of who named a path, with exit code 2."""
    monkeypatch.setattr(sys, "argv", ["slimebus", "weights", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert (ended.value.code, said.count("\n")) == (2, 1), said
    return said


def test_a_wrong_base_is_told_with_what_was_expected_and_nothing_is_begun(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = pair
    delta, digest = write_between(a, b, tmp_path / "x.delta"), run("verify", b).stdout.split()[-1]
    old, new = (as_weights(model(seed)).hashes[LAYERS[3]] for seed in (0, 8))
    write_model(tmp_path / "more", {**model(8), "more": model(0)[LAYERS[0]]})
    write_model(tmp_path / "less", {name: tensor for name, tensor in model(0).items() if name != LAYERS[2]})
    (tmp_path / "empty").mkdir()
    expected = f"expected what it starts from, with tensor '{LAYERS[3]}' of hash {old}"
    other = f"tensor '{LAYERS[3]}' of the base is not what the delta starts from (version 0): the base has bfloat16 64x32, hash {new}"
    for wrong, why in {
        b: f"the base has digest {digest}: it is already what the delta leads to; {expected}",
        tmp_path / "more": f"{other}; expected bfloat16 64x32, hash {old}",
        tmp_path / "less": f"tensor '{LAYERS[2]}' of the base is not what the delta starts from (version 0): the base has no such tensor",
        tmp_path / "empty": f"{tmp_path}/empty has no .safetensors file",
        delta: f"{delta} is a delta to version 0: it has what changed and no model",
    }.items():
        assert why in told(("apply", wrong, delta, tmp_path / "out"), monkeypatch, capsys)
    assert not (tmp_path / "out").exists()
    assert f"{tmp_path}/empty has no" in told(("verify", delta, "--base", tmp_path / "empty"), monkeypatch, capsys)


def test_what_cannot_be_read_is_named(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(path: Path, base: None) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(stored_weights, "verify", refused)
    assert "is a directory" in told(("apply", pair[0], pair[1], "out"), monkeypatch, capsys)
    assert told(("verify", pair[0]), monkeypatch, capsys) == f"slimebus: {pair[0]}: Permission denied\n"
