"""Megatron's fields, the schedule, and the model directory: refusals in one line, without torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slimebus.bus.errors import DataError
from slimebus.cli.config.schema import OptimizerConfig
from trainer.model.hf_folder import check_vocabulary, read_config


def write_model(folder, vocab_size, tokens):
    (folder / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
    vocab = {f"t{i}": i for i in range(tokens)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": [{"id": tokens, "content": "<end>"}]}))


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path):
    write_model(tmp_path, vocab_size=38, tokens=38)
    with pytest.raises(DataError, match="gives token '<end>' id 38, but the model's vocab_size is 38; model and tokenizer do not match"):
        check_vocabulary(tmp_path)


def test_a_padded_model_vocabulary_is_accepted(tmp_path):
    write_model(tmp_path, vocab_size=64, tokens=37)
    check_vocabulary(tmp_path)


def test_a_directory_without_config_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"config\.json.*No such file.*; expected a Hugging Face model directory"):
        read_config(tmp_path)


def test_what_runs_before_the_broker_is_joined_needs_no_torch():
    code = """
import sys, trainer.process, trainer.checkpoint.folder
from trainer.model.megatron_fields import split_megatron_options
split_megatron_options({"adam_eps": 1e-7})
assert not {"torch", "megatron.core", "transformers"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], timeout=60)


def test_cosine_decay_ends_at_min_lr():
    from trainer.model.optimizer import learning_rate

    settings = OptimizerConfig(lr=1.0, min_lr=0.1, lr_warmup_iters=2, lr_decay_iters=12, lr_decay_style="cosine")
    rates = [learning_rate(settings, step, num_updates=99) for step in (0, 1, 2, 7, 12, 99)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.55, 0.1, 0.1])
