"""A profile of some steps: torch's trace of each rank, and on CUDA a snapshot of its memory."""

import logging
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger("trainer")

MAX_MEMORY_EVENTS = 100_000


class StepProfile:
    """Traces steps `first` to `last` of a run; every rank has one. What it writes can be opened in ui.perfetto.dev, and memory snapshots
    at pytorch.org/memory_viz.
    """

    def __init__(self, folder: Path, steps: range, rank: int) -> None:
        self.folder, self.steps, self.rank = folder, steps, rank
        self._profiler: Any = None

    def before(self, step: int) -> None:
        """Begin at the first step."""
        if step != self.steps.start:
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=MAX_MEMORY_EVENTS)
        self._profiler = torch.profiler.profile(activities=activities, record_shapes=True)
        self._profiler.start()

    def after(self, step: int) -> None:
        """Write at the last step."""
        if self._profiler is None or step + 1 < self.steps.stop:
            return
        self._profiler.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        trace = self.folder / f"trace-rank{self.rank}.json.gz"
        self._profiler.export_chrome_trace(str(trace))
        self._profiler = None
        if torch.cuda.is_available():
            torch.cuda.memory._dump_snapshot(str(self.folder / f"memory-rank{self.rank}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        log.info("profile of steps %d to %d written to %s", self.steps.start, self.steps.stop - 1, trace)
