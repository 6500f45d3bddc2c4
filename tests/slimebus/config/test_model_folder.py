"""What a model directory says of itself, and whether its tokenizer is the model's."""

import json
from pathlib import Path

import pytest

from slimebus.bus.errors import ConfigError
from slimebus.config.model_folder import read_config, vocab_size, vocabulary_problems


def write_model(folder: Path, size: int, tokens: int, *, is_unigram: bool = False) -> None:
    (folder / "config.json").write_text(json.dumps({"vocab_size": size}))
    names = [f"t{i}" for i in range(tokens)]
    vocab = [[name, 0.0] for name in names] if is_unigram else {name: i for i, name in enumerate(names)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": [{"id": tokens, "content": "<end>"}]}))


@pytest.mark.parametrize("is_unigram", [False, True])
def test_a_tokenizer_larger_than_the_model_is_told(tmp_path: Path, is_unigram: bool) -> None:
    write_model(tmp_path, 38, 38, is_unigram=is_unigram)
    (problem,) = vocabulary_problems(tmp_path)
    assert "gives token '<end>' id 38, but the model's vocab_size is 38; model and tokenizer do not match" in problem


def test_a_padded_vocabulary_and_a_directory_without_tokenizer_are_accepted(tmp_path: Path) -> None:
    write_model(tmp_path, 64, 37)
    assert not list(vocabulary_problems(tmp_path))
    write_model(tmp_path, 5, 37)
    (tmp_path / "tokenizer.json").unlink()
    assert not list(vocabulary_problems(tmp_path))


def test_a_tokenizer_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    write_model(tmp_path, 64, 37)
    (tmp_path / "tokenizer.json").write_text("{")
    (problem,) = vocabulary_problems(tmp_path)
    assert "tokenizer.json: " in problem


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json.*No such file.*; expected a Hugging Face model directory"):
        read_config(tmp_path)


def test_the_vocabulary_of_a_model_of_several_parts_is_that_of_its_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 7}}')
    assert vocab_size(tmp_path) == 7
