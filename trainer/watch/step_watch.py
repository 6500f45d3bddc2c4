"""One step of training, watched: profiled, dumped when it goes wrong, its speed measured. No collective of its own between steps."""

import time
from pathlib import Path

from slimebus.bus.errors import SlimebusError
from slimebus.config import Resolved
from trainer.checkpoint.trained_state import random_state
from trainer.model import parallel
from trainer.model.policy import Policy
from trainer.session.step_batch import StepBatch, StepPlan
from trainer.watch.dumps import Dumps
from trainer.watch.profile import StepProfile
from trainer.watch.sample_dump import SampleDump
from trainer.watch.speed import Speed


class StepWatch:
    """Every rank makes one. profile: steps that are traced. is_dumping: off in a replay, which has its batches on disk already."""

    def __init__(self, resolved: Resolved, file: Path | None, policy: Policy, *, profile: range | None, is_dumping: bool = True) -> None:
        self.policy, rank = policy, parallel.rank()
        self.dumps = Dumps(resolved, file, rank) if is_dumping else None
        limit = resolved.config.trainer.dump_samples if is_dumping and rank == 0 else 0
        self.samples = SampleDump(resolved.run_dir, limit) if limit else None
        self.profile = StepProfile(resolved.run_dir / "profile", profile, rank) if profile else None
        self.speed = Speed(policy)

    def train(self, step: int, batch: StepBatch | None, plan: StepPlan, *, version: int) -> dict[str, float]:
        """policy.train on rank 0's batch, and its metrics."""
        random, started = random_state(), time.perf_counter()
        if self.profile:
            self.profile.before(step)
        try:
            groups = batch.groups if batch else None
            metrics = self.policy.train(groups, num_steps=plan.num_steps, version=version, learning_rates=plan.learning_rates)
        except SlimebusError as bad:
            if bad.code == "nonfinite" and self.dumps:
                self.dumps.write("nonfinite", step, batch, {}, random)
            raise
        if self.profile:
            self.profile.after(step)
        if self.dumps and (reason := self.dumps.reason(metrics)):
            self.dumps.write(reason, step, batch, metrics, random)
        if self.samples and batch:
            self.samples.add(batch)
        return metrics | (self.speed.of(batch, time.perf_counter() - started) if batch else {})
