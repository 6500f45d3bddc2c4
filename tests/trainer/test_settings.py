"""What a trainer's process loads, and the schedule of its learning rate."""

import subprocess
import sys
from pathlib import Path

import pytest

from slimebus.config.schema import OptimizerConfig


def test_what_runs_before_the_broker_is_joined_needs_no_torch():
    code = """
import sys, trainer.main, trainer.checkpoint.folder
assert not {"torch", "megatron.core", "transformers"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], timeout=60)


def test_cosine_decay_ends_at_min_lr():
    from trainer.model.optimizer import learning_rate

    settings = OptimizerConfig(lr=1.0, min_lr=0.1, lr_warmup_iters=2, lr_decay_iters=12, lr_decay_style="cosine")
    rates = [learning_rate(settings, step, num_updates=99) for step in (0, 1, 2, 7, 12, 99)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.55, 0.1, 0.1])
