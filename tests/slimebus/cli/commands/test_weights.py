"""The weights command on directories and files."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from delta_files import write_between
from slimebus_command import slimebus

from slimebus.bus.errors import UsageError
from slimebus.cli.commands.weights import weights
from slimebus.cli.root import main
from slimebus.weights.files import stored_weights
from slimebus.weights.files.disk_chain import DiskChain
from slimebus.weights.host.safetensors_file import as_weights, read_model, write_file, write_model
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


# --- odd directories, as a person at a shell meets them ---


def shell(*words: Any) -> tuple[int, str]:
    """Exit code and output of the real command."""
    ended = slimebus("weights", *words)
    return ended.returncode, ended.stdout + ended.stderr


def sharded(folder: Path, tensors: dict[str, Tensor], names: dict[str, str] | None = None) -> Path:
    """Two shards and an index. names: the weight_map, if another than the true one."""
    folder.mkdir()
    half = len(tensors) // 2
    shards = {"model-1.safetensors": dict(list(tensors.items())[:half]), "model-2.safetensors": dict(list(tensors.items())[half:])}
    for file, part in shards.items():
        write_file(folder / file, part)
    weight_map = names or {name: file for file, part in shards.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def raw_file(path: Path, header: str, data: bytes) -> Path:
    encoded = header.encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)
    return path


def test_the_exit_code_at_a_shell_says_whether_all_is_well(pair: tuple[Path, Path]) -> None:
    a, b = pair
    assert shell("verify", a)[0] == 0
    (b / "model.safetensors").write_bytes((b / "model.safetensors").read_bytes()[:-100])
    code, text = shell("verify", b)
    assert (code, "not a whole safetensors file" in text) == (1, True)
    assert shell("verify", a, "--digest", "0" * 64)[0] == 1
    assert shell("verify", a / "nothing")[0] == 2


def test_shards_are_one_model(pair: tuple[Path, Path], tmp_path: Path) -> None:
    shards = sharded(tmp_path / "sharded", model(8))
    digest = run("verify", pair[1]).stdout.split()[-1]
    assert digest in run("verify", shards, "--digest", digest).stdout
    write_between(pair[0], shards, tmp_path / "x.delta")
    run("apply", pair[0], tmp_path / "x.delta", tmp_path / "out")
    assert digest in run("verify", tmp_path / "out").stdout


def test_shards_without_an_index_are_one_model_when_none_is_missing(pair: tuple[Path, Path], tmp_path: Path) -> None:
    folder, tensors = tmp_path / "shards", model(8)
    folder.mkdir()
    for number, name in enumerate(tensors, start=1):
        write_file(folder / f"model-{number:05d}-of-{len(tensors):05d}.safetensors", {name: tensors[name]})
    run("verify", folder, "--digest", as_weights(tensors).digest)
    next(folder.iterdir()).unlink()
    assert f"{len(tensors) - 1} of the {len(tensors)} shards of model are there" in run("verify", folder, code=1).stderr


def test_what_cannot_be_read_is_named_with_exit_code_2(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "is a directory" in run("apply", pair[0], pair[1], "out", code=2).stderr

    def refused(path: Path, base: None) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(stored_weights, "verify", refused)
    monkeypatch.setattr(sys, "argv", ["slimebus", "weights", "verify", str(pair[0])])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"slimebus: {pair[0]}: Permission denied\n"


def test_shards_that_do_not_fit_their_index_are_named(tmp_path: Path) -> None:
    tensors = model(0)
    lacking = sharded(tmp_path / "lacking", tensors)
    (lacking / "model-2.safetensors").unlink()
    assert "model-2.safetensors" in run("verify", lacking, code=1).stderr
    promised = sharded(tmp_path / "promised", tensors, {"not.there": "model-1.safetensors"})
    assert "index.json says are in it are not, such as 'not.there'" in run("verify", promised, code=1).stderr
    swapped = sharded(tmp_path / "swapped", tensors, {LAYERS[0]: "model-2.safetensors"})
    assert f"not, such as '{LAYERS[0]}'" in run("verify", swapped, code=1).stderr
    outside = sharded(tmp_path / "outside", tensors, {"x": "../lacking/model-1.safetensors"})
    assert "outside of" in run("verify", outside, code=1).stderr
    broken = sharded(tmp_path / "broken", tensors)
    (broken / "model.safetensors.index.json").write_text("[1,")
    assert "weight_map" in run("verify", broken, code=1).stderr


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ('{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}', "not fully covered"),
        ('{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}', "invalid offset"),
        ('{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[1],"data_offsets":[3,4]}}', "invalid offset"),
        ('{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}', "not fully covered"),
        ('{"a":{"dtype":"BF16","shape":[1.5],"data_offsets":[0,2]}}', "Error while deserializing"),
        ('{"a":{"dtype":"BF17","shape":[1],"data_offsets":[0,2]}}', "Error while deserializing"),
        ('{"a":{"dtype":"U8","shape":[-4],"data_offsets":[0,4]}}', "integer `-4`"),
        ('{"a":{"dtype":"U8","shape":[4],"data_offsets":[4,0]}}', "Error while deserializing"),
        ('{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,99]}}', "Error while deserializing"),
        ('{"a":{"dtype":"U8","shape":[' + "9223372036854775807," * 40 + '1],"data_offsets":[0,4]}}', "overflow"),
        ('{"\\ud800":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', "invalid JSON"),
        ('{"a\\n":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', "do not print"),
        ("[" * 100_000, "invalid JSON"),
        ("[]", "invalid JSON"),
        ('{"a": 3}', "Error while deserializing"),
    ],
)
def test_a_safetensors_header_that_lies_is_refused(tmp_path: Path, header: str, why: str) -> None:
    assert why in run("verify", raw_file(tmp_path / "x.safetensors", header, b"1234"), code=1).stderr


def test_an_empty_folder_a_missing_tensor_and_a_file_in_its_place(pair: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = pair
    (tmp_path / "empty").mkdir()
    (tmp_path / "nothing.safetensors").write_bytes(b"")
    for place in ("empty", "nothing.safetensors"):
        assert run("verify", tmp_path / place, code=1).stderr
    write_between(a, b, tmp_path / "x.delta")
    write_model(tmp_path / "less", {name: tensor for name, tensor in model(0).items() if name != LAYERS[2]})
    for wrong in ("less", "empty"):
        result = CliRunner().invoke(weights, ["apply", str(tmp_path / wrong), str(tmp_path / "x.delta"), str(tmp_path / "out")])
        assert isinstance(result.exception, UsageError)
        assert not (tmp_path / "out").exists(), "nothing is begun for a wrong base"


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


def test_apply_over_a_sharded_directory_leaves_none_of_its_shards(pair: tuple[Path, Path], tmp_path: Path) -> None:
    out = sharded(tmp_path / "out", model(3))
    write_file(out / "model-00001-of-00001.safetensors", model(4))
    write_between(*pair, tmp_path / "x.delta")
    run("apply", pair[0], tmp_path / "x.delta", out)
    assert [path.name for path in out.glob("*.safetensors*")] == ["model.safetensors"]


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


def test_a_delta_of_another_lineage_on_the_same_bytes_is_judged_by_its_hashes(tmp_path: Path) -> None:
    """The chain's own delta leads from a model directory too, whatever that is called; from other bytes it does not."""
    store, chain = VersionStore(lineage="L"), DiskChain(tmp_path / "chain", "L")
    for seed in range(2):
        newest = store.publish({name: (t.dtype, t.shape, t.buffer) for name, t in model(seed).items()})
        chain.write(store)
        chain.announce(newest.version, newest.digest)
    write_model(tmp_path / "v0", model(0))
    write_model(tmp_path / "other", model(5))
    run("apply", tmp_path / "v0", chain.folder / "000001-0.delta", tmp_path / "v1")
    assert store.newest is not None
    assert store.newest.digest in run("verify", tmp_path / "v1").stdout
    result = CliRunner().invoke(weights, ["apply", str(tmp_path / "other"), str(chain.folder / "000001-0.delta"), str(tmp_path / "no")])
    assert "of the base is not what the delta starts from" in str(result.exception)


def refused(*words: Any) -> str:
    """Why a command does nothing."""
    result = CliRunner().invoke(weights, [str(word) for word in words])
    assert isinstance(result.exception, UsageError), result.output
    return result.exception.text


def test_a_delta_is_refused_by_what_it_has_made_already(pair: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = pair
    delta, digest = tmp_path / "x.delta", run("verify", b).stdout.split()[-1]
    write_between(a, b, delta)
    why = refused("apply", b, delta, tmp_path / "out")
    expected = f"expected what it starts from, with tensor '{LAYERS[3]}' of hash {as_weights(model(0)).hashes[LAYERS[3]]}"
    assert why == f"the base has digest {digest}: it is already what the delta leads to; {expected}"
    assert not (tmp_path / "out").exists()


def test_a_base_of_which_one_tensor_is_another_is_refused_with_both_hashes(pair: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = pair
    write_between(a, b, tmp_path / "x.delta")
    write_model(tmp_path / "more", {**model(8), "more": model(0)[LAYERS[0]]})
    hashes = [as_weights(model(seed)).hashes[LAYERS[3]] for seed in (8, 0)]
    why = refused("apply", tmp_path / "more", tmp_path / "x.delta", tmp_path / "out")
    assert f"tensor '{LAYERS[3]}' of the base is not what the delta starts from (version 0)" in why
    assert why.endswith(f"the base has bfloat16 64x32, hash {hashes[0]}; expected bfloat16 64x32, hash {hashes[1]}")


def test_a_delta_file_in_place_of_a_model_is_refused_as_such(pair: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = pair
    delta = tmp_path / "x.delta"
    write_between(a, b, delta)
    for words in (("apply", delta, delta, "out"), ("verify", delta, "--base", delta)):
        assert f"{delta} is a delta to version 0: it has what changed and no model" in refused(*words)


def test_a_path_without_weights_is_a_mistake_of_one_line_and_exit_code_2(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    delta = write_between(*pair, tmp_path / "x.delta")
    for words in (["apply", tmp_path, delta, "out"], ["verify", delta, "--base", tmp_path]):
        monkeypatch.setattr(sys, "argv", ["slimebus", "weights", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr().err
        assert (ended.value.code, said.count("\n")) == (2, 1), said
        assert said.startswith(f"slimebus: {tmp_path}")


def test_what_is_written_can_be_read_by_others(tmp_path: Path) -> None:
    write_model(tmp_path / "made", model(0))
    assert [oct(file.stat().st_mode & 0o777) for file in (tmp_path / "made").iterdir()] == ["0o644"]
