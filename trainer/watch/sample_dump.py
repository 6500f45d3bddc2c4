"""The newest trained samples of a run, on disk, for `slimebus view` and `slimebus trainer --replay`.

RUN_DIR/samples/step_00000041/   the batch of a step, in the files of a dump (trainer/watch/dumps.py)
"""

import contextlib
import logging
import shutil
from pathlib import Path

import msgspec

from slimebus.bus.errors import SlimebusError
from slimebus.client.exported_groups import SAMPLES_FOLDER, read_groups, step_folders
from trainer.session.step_batch import StepBatch
from trainer.watch.dumps import write_batch

log = logging.getLogger("trainer")


class SampleDump:
    """At most `limit` samples under run_dir, of the newest steps, whole groups only."""

    def __init__(self, run_dir: Path, limit: int) -> None:
        self.folder, self.limit = run_dir / SAMPLES_FOLDER, limit
        self._counts: dict[int, int] = {}
        for step, place in step_folders(self.folder).items():
            count = limit  # of one that a power cut left unreadable: it is the first to go
            with contextlib.suppress(SlimebusError):
                count = sum(group.num_samples for group in read_groups(place))
            self._counts[step] = count

    def add(self, batch: StepBatch) -> None:
        """Keep a step that was trained, in place of the oldest ones, and of what another timeline had from this step on.

        Of a batch of more than `limit` samples the first groups are kept. What cannot be written is logged.
        """
        kept, count = [], 0
        for group in batch.groups:
            if count + len(group.samples) <= self.limit:
                kept.append(group)
                count += len(group.samples)
        if not kept:
            return
        try:
            unfinished = self.folder / ".unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            write_batch(unfinished, msgspec.structs.replace(batch, groups=kept))
            self._make_room(batch.step, count)
            unfinished.rename(self._place(batch.step))
            self._counts[batch.step] = count
        except (OSError, SlimebusError) as bad:
            log.error("the samples of step %d cannot be kept: %s", batch.step, bad)

    def _make_room(self, step: int, count: int) -> None:
        for old in sorted(self._counts):
            if old >= step or sum(self._counts.values()) + count > self.limit:
                del self._counts[old]
                shutil.rmtree(self._place(old), ignore_errors=True)  # someone may have removed it

    def _place(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"
