"""When the loop saves and where it resumes: policy of files around Policy.save_checkpoint."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from slimebus.config import Resolved
from trainer.checkpoint_folder import latest_checkpoint

if TYPE_CHECKING:
    from trainer.policy import Policy

log = logging.getLogger("trainer")


class Checkpoints:
    """The checkpoints of one run, under RUN_DIR/checkpoints. `durable` is the step that the newest one would go on with."""

    def __init__(self, resolved: Resolved) -> None:
        trainer = resolved.config.trainer
        self.directory: Path = resolved.run_dir / "checkpoints"
        self.interval, self.keep = trainer.save_interval, trainer.keep_checkpoints
        self.update_interval = resolved.config.weights.update_weights_interval
        self.num_rollout = resolved.config.rollout.num_rollout
        self.save_hf = resolved.run_dir / trainer.save_hf if trainer.save_hf else None
        self.durable = 0

    def resume(self, policy: "Policy") -> tuple[int, int]:
        """Load the newest checkpoint, if there is one; the step to train next and the version that it trains."""
        found = latest_checkpoint(str(self.directory))
        if found is None:
            return 0, 0
        self.durable, extra = policy.load_checkpoint(str(self.directory))
        log.info("resumed at step %d from %s", self.durable, found)
        return self.durable, extra.get("version", self.durable // self.update_interval)

    def save_if_due(self, policy: "Policy", next_step: int, version: int, confirm: Callable[[], None]) -> int:
        """Save when the interval or the end says so, with the version that `next_step` trains.

        The step that the newest durable checkpoint goes on with. confirm: raises Fenced when another trainer has taken this one's place;
        a checkpoint of an abandoned timeline must never be what its successor resumes from.
        """
        due = self.interval and next_step % self.interval == 0
        if due or next_step == self.num_rollout:
            policy.save_checkpoint(str(self.directory), next_step, {"version": version}, keep=self.keep, confirm=confirm)
            self.durable = next_step
        return self.durable

    def close(self, policy: "Policy") -> None:
        """Write the final model in Hugging Face layout where the config asks for it."""
        if self.save_hf is not None:
            policy.save_hf(str(self.save_hf))
            log.info("final model written to %s", self.save_hf)
