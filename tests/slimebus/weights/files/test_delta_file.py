"""What leads from one version to another, in a file."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from delta_files import between

from slimebus.bus.errors import WeightsError
from slimebus.weights.files import delta_file
from slimebus.weights.host.safetensors_file import as_weights
from slimebus.weights.messages import SAME
from slimebus.weights.tensors import Weights, as_tensor


def version(model: dict[str, Any], number: int = 0, lineage: str = "L") -> Weights:
    return as_weights({name: as_tensor(name, value) for name, value in model.items()}, lineage=lineage, version=number)


def write(path: Path, base: Weights, target: Weights) -> Path:
    delta_file.write(path, *between(base, target))
    return path


def test_a_delta_applied_to_its_base_gives_the_target_bit_for_bit(model: Any, after: Any, check: Any, tmp_path: Path) -> None:
    newer = after(model, 1)
    path = write(tmp_path / "1.delta", version(model), version(newer, 1))
    made = delta_file.apply(delta_file.read(path), version(model))
    check(made, newer)
    assert (made.lineage, made.version, made.digest) == ("L", 1, version(newer, 1).digest)


def test_a_new_a_gone_and_a_reshaped_tensor_are_followed(model: Any, check: Any, tmp_path: Path) -> None:
    newer = {name: value for name, value in model.items() if name != "norm"}
    newer |= {"extra": np.arange(6, dtype=np.uint16), "fixed": model["fixed"].reshape(50, 100)}
    path = write(tmp_path / "1.delta", version(model), version(newer, 1))
    check(delta_file.apply(delta_file.read(path), version(model)), newer)


def test_unchanged_tensors_take_no_bytes_and_share_the_base(model: Any, after: Any, tmp_path: Path) -> None:
    base = version(model)
    found = delta_file.read(write(tmp_path / "1.delta", base, version(after(model, 1), 1)))
    assert {e.name for e in found.manifest.tensors if e.kind == SAME} == {"fixed", "scalar", "empty", "fp8", "step"}
    assert delta_file.apply(found, base).tensors["fixed"].buffer is base.tensors["fixed"].buffer


def test_a_base_of_another_name_counts_when_its_bytes_are_right(model: Any, after: Any, check: Any, tmp_path: Path) -> None:
    newer = after(model, 1)
    path = write(tmp_path / "1.delta", version(model), version(newer, 1))
    check(delta_file.apply(delta_file.read(path), version(model, 5, "other")), newer)


def test_another_base_is_refused_by_the_name_of_the_tensor(model: Any, after: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "1.delta", version(model), version(after(model, 1), 1))
    with pytest.raises(WeightsError, match=r"tensor .(embed|half|norm). of the base is not what the delta starts from"):
        delta_file.apply(delta_file.read(path), version(after(model, 2)))


@pytest.mark.parametrize("place", [0, 9, 20, 40, -1, -3000])
def test_a_damaged_byte_anywhere_is_an_error_and_no_wrong_tensor(model: Any, after: Any, tmp_path: Path, place: int) -> None:
    path = write(tmp_path / "1.delta", version(model), version(after(model, 1), 1))
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(WeightsError):
        delta_file.apply(delta_file.read(path), version(model))


@pytest.mark.parametrize("keep", [0, 10, 31, 200, -1])
def test_a_file_that_is_cut_off_is_refused(model: Any, after: Any, tmp_path: Path, keep: int) -> None:
    path = write(tmp_path / "1.delta", version(model), version(after(model, 1), 1))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(WeightsError):
        delta_file.read(path)


def test_a_file_that_becomes_shorter_while_it_is_read_is_an_error(model: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "0.full", version({}, -1), version(model))
    found = delta_file.read(path)
    os.truncate(path, 4096)
    with pytest.raises(WeightsError, match=r"0\.full was cut off while it was read"):
        delta_file.apply(found, None)
