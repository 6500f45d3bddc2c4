"""A file is replaced whole or not at all."""

from pathlib import Path

import pytest

from slimebus.atomic_file import make_private, replacing


def test_the_new_content_takes_the_place_of_the_old_with_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "latest"
    path.write_bytes(b"old")
    with replacing(path, mode=0o600) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"new", 0o600)
    assert list(tmp_path.iterdir()) == [path]


def _fail_half_way(path: Path) -> None:
    with replacing(path) as file:
        file.write(b"half")
        raise OSError("full")


def test_a_block_that_raises_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "latest"
    path.write_bytes(b"old")
    with pytest.raises(OSError, match="full"):
        _fail_half_way(path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught, replacing(tmp_path / "no" / "latest"):
        pass
    assert caught.value.filename == str(tmp_path / "no" / "latest")


def test_a_private_folder_and_those_above_it_are_for_their_owner_alone_and_others_keep_their_modes(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    for _ in range(2):
        make_private(tmp_path / "run" / "metrics")
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path, tmp_path / "run", tmp_path / "run" / "metrics")]
    assert modes == [0o755, 0o700, 0o700]
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        make_private(tmp_path / "file")
