"""The algorithm of a run, on one screen.

    publish v0;  for each step:  take a batch -> advantages and loss -> optimizer -> publish -> checkpoint -> commit

Every rank runs this; rank 0 alone has a `source` of batches: the broker, or a folder. Which ranks serve weights:
trainer/publish/publication.py.
"""

import logging
import time
from collections.abc import Sequence

from slimebus.config import RunConfig
from slimebus.telemetry.spans import Spans
from trainer.checkpoint.schedule import CheckpointSchedule
from trainer.mismatch import engine_mismatch
from trainer.model import parallel
from trainer.model.policy import Policy
from trainer.publish.publication import Publication
from trainer.session.replay import NoPublication, ReplayStart
from trainer.session.step_batch import NOT_YET, BatchSource, EndOfBatches, StepBatch, StepPlan
from trainer.session.stop_request import BROADCAST_INTERVAL_S, StopRequest
from trainer.watch.step_watch import StepWatch

log = logging.getLogger("trainer")

POLL_S = 0.2
"""How often rank 0 looks whether it is asked to stop."""


def train(
    policy: Policy,
    source: BatchSource | None,
    publication: Publication | NoPublication,
    checkpoints: CheckpointSchedule | ReplayStart,
    watch: StepWatch,
    config: RunConfig,
    spans: Spans,
    stop: StopRequest,
) -> None:
    """Train from where the newest checkpoint ends to the last step, until `stop` is made, or until the batches end."""
    start = checkpoints.resume(policy)
    version = start.version
    publication.begin(version)
    checkpoints.lineage = publication.lineage
    if source:
        checkpoints.check_newest()
        source.begin(start, publication, policy.model.vocab_size)
        checkpoints.check_newest()
    publication.publish(version)
    with stop.deferred():
        for step in range(start.step, config.rollout.num_rollout):
            with spans("wait", step=step) as wait:
                rates, num_passes = policy.learning_rates(config.rollout.num_updates_per_rollout), config.rollout.num_passes_per_rollout
                batch, plan = next_batch(source, step, rates, stop, num_passes)
            if plan.stops:
                checkpoints.save_and_stop(policy, step, version)
                return
            interval, measured = config.trainer.mismatch_interval, dict[str, float]()
            if interval and step % interval == 0 and isinstance(publication, Publication):
                with spans("mismatch", step=step):
                    measured = engine_mismatch(policy, publication, batch.groups if batch else None, version)
            with spans("train", step=step) as work:
                metrics = watch.train(step, batch, plan, version=version)
                policy.refresh_reference(step + 1)
            with spans("publish", step=step) as copy:
                if plan.publishes:
                    version += 1
                    publication.publish(version)
                    copy.about["version"] = version
            with spans("save", step=step) as save:
                saved = checkpoints.save_if_due(policy, step + 1, version)
            if source and batch:
                times = {"wait_s": wait.seconds, "train_s": work.seconds, "publish_s": copy.seconds, "save_s": save.seconds}
                times["checkpoint_age_s"] = checkpoints.age_s
                with spans("commit", step=step):
                    source.commit(step, batch, saved, metrics | measured | times)
    checkpoints.close(policy)
    stop.keep_deadline()
    if source:
        source.finish()
    publication.finish()


def next_batch(
    source: BatchSource | None, step: int, schedule: Sequence[float], stop: StopRequest, num_passes: int = 1
) -> tuple[StepBatch | None, StepPlan]:
    """Rank 0's batch of `step`, None elsewhere, and on every rank how it is trained; however long samples take to come.

    schedule: the learning rates of as many optimizer steps as there are at most, over all passes.
    """
    while True:
        batch, until = None, time.monotonic() + BROADCAST_INTERVAL_S
        has_ended = False
        try:
            while source and not batch and not stop.is_made and time.monotonic() < until:
                batch = source.take_batch(step, POLL_S)
        except EndOfBatches:
            has_ended = True
        mine = StepPlan(stops=True) if stop.is_made or has_ended else batch.plan(schedule, num_passes) if batch else NOT_YET
        plan = parallel.broadcast_value(mine if source else None, StepPlan)
        if source and batch and not plan.stops:
            source.record(batch)
        if plan != NOT_YET:
            return batch, plan
