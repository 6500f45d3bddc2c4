"""Checkpoints as one call: save and wait until it is whole, load."""

from collections.abc import Callable
from pathlib import Path

from trainer.checkpoint.load import load_checkpoint
from trainer.checkpoint.manifest import Progress
from trainer.checkpoint.save import BackgroundSave
from trainer.model.learner import Learner

__all__ = ["Progress", "load_checkpoint", "save_checkpoint"]


def save_checkpoint(
    folder: str | Path,
    policy: Learner,
    step: int,
    version: int = 0,
    lineage: str = "",
    *,
    keep: int = 2,
    confirm: Callable[[], None] = lambda: None,
) -> None:
    """Write `folder`/step_N and point `folder`/latest at it once it is whole; the newest `keep` remain. Every rank calls it.

    Raises SlimebusError `checkpoint` when it could not be written.
    """
    BackgroundSave(folder, policy, Progress(step, version, policy.num_updates, lineage), confirm).finish(keep)
