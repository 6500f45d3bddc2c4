"""When the loop saves and where it resumes."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from slimebus.bus.errors import Fenced, SlimebusError
from slimebus.config import Resolved
from trainer.checkpoint.folder import Progress, oldest_step, saved_step
from trainer.checkpoint.load import load_checkpoint
from trainer.checkpoint.save import BackgroundSave
from trainer.model.learner import Learner
from trainer.model.policy import Policy

log = logging.getLogger("trainer")

LAST_SAVE_S = 1200.0
"""How long the end of the run waits for its last checkpoint; a disk that takes longer does not answer."""


class CheckpointSchedule:
    """The checkpoints of one run, under RUN_DIR/checkpoints or another folder. They are written beside the steps that follow.

    confirm: raises Fenced, on the main rank, when another trainer has taken this one's place; a checkpoint of an abandoned timeline must
    never be what its successor resumes from.
    """

    def __init__(self, resolved: Resolved, confirm: Callable[[], None] = lambda: None, folder: Path | None = None) -> None:
        trainer = resolved.config.trainer
        self.directory: Path = folder or resolved.run_dir / "checkpoints"
        self.confirm = confirm
        self.interval, self.keep = trainer.save_interval, trainer.keep_checkpoints
        self.num_rollout = resolved.config.rollout.num_rollout
        self.save_hf = resolved.run_dir / trainer.save_hf if trainer.save_hf else None
        self.saved_step, self._saved_at = 0, time.monotonic()
        """What the newest complete checkpoint goes on with, and when it was completed or loaded, or this process began."""
        self.lineage = ""
        """Of this trainer; one that goes on from its checkpoints says so to the broker."""
        self.position = 0
        """Of a critic: up to which the groups of the bus are learned."""
        self._writing: BackgroundSave | None = None

    @property
    def age_s(self) -> float:
        """Seconds for which no checkpoint was completed: what a crash costs now, apart from the restart."""
        return time.monotonic() - self._saved_at

    def resume(self, policy: Learner) -> Progress:
        """Load the newest checkpoint that is whole, if a node has one; how far it is."""
        found = load_checkpoint(self.directory, policy)
        if found is None:
            log.info("no checkpoint in %s: training begins at step 0", self.directory.absolute())
            return Progress(step=0, version=0, num_updates=0)
        self.saved_step, self.position = found.step, found.position
        log.info("resumed at step %d from %s", self.saved_step, self.directory)
        return found

    def check_newest(self) -> None:
        """Raise Fenced, on the main rank, when another trainer has saved since this one has loaded its checkpoint: the run is further."""
        newest = saved_step(self.directory) or 0
        if newest != self.saved_step:
            text = f"another trainer has saved step {newest} since this one has loaded step {self.saved_step}; start this one again"
            raise Fenced(f"{self.directory}: {text}")

    def save_if_due(self, policy: Learner, next_step: int, version: int) -> int:
        """Begin to save when the interval or the end says so, with the version that `next_step` trains; the last one is waited for.

        The first step with samples that a trainer may need again: that of the oldest complete checkpoint kept.
        """
        if self._writing and self._writing.is_written():
            self._finish_save()
        if next_step == self.num_rollout:
            self.save(policy, next_step, version)
        elif self.interval and next_step % self.interval == 0:
            self._begin_save(policy, next_step, version)
        oldest = oldest_step(self.directory)
        if oldest is None:
            return 0 if self.interval else next_step  # without checkpoints a trainer begins anew at step 0
        return oldest

    def save_and_stop(self, policy: Learner, next_step: int, version: int) -> None:
        """Save what no checkpoint holds yet, and log from where the run goes on."""
        if self._writing:
            self._finish_save()
        if next_step > self.saved_step:
            self.save(policy, next_step, version)
        log.info("stopped before step %d; all steps before it are saved, and the run goes on from there", next_step)

    def save(self, policy: Learner, next_step: int, version: int) -> None:
        """Save now, and return when the checkpoint is whole. Raises SlimebusError `checkpoint` when it could not be written."""
        self._begin_save(policy, next_step, version)
        assert self._writing is not None  # begun above
        writing, self._writing = self._writing, None
        writing.finish(self.keep, LAST_SAVE_S)
        self.saved_step, self._saved_at = next_step, time.monotonic()

    def _begin_save(self, policy: Learner, next_step: int, version: int) -> None:
        if self._writing:
            log.warning("the checkpoint of step %d is still being written: step %d waits for it", self._writing.step, next_step)
            self._finish_save()
        progress = Progress(next_step, version, policy.num_updates, self.lineage, self.position)
        self._writing = BackgroundSave(self.directory, policy, progress, self.confirm)

    def _finish_save(self) -> None:
        """Make what is being written the newest checkpoint. One that could not be written is logged: the run goes on without it."""
        assert self._writing is not None  # asked by the callers
        writing, self._writing = self._writing, None
        try:
            writing.finish(self.keep, LAST_SAVE_S)
            self.saved_step, self._saved_at = writing.step, time.monotonic()
        except SlimebusError as bad:
            if bad.code != "checkpoint":
                raise
            log.error("%s; the newest checkpoint is still that of step %d", bad.text, self.saved_step)

    def close(self, policy: Policy) -> None:
        """Write the final model in Hugging Face layout where the config asks for it."""
        if self.save_hf is not None:
            policy.save_hf(str(self.save_hf))
            log.info("final model written to %s", self.save_hf)
