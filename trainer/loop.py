"""The algorithm of a run, on one screen.

    publish v0;  for each step:  take a batch -> advantages and loss -> optimizer -> publish -> checkpoint -> commit

Every rank runs this; rank 0 alone has a `session` (the broker's batches). Which ranks serve weights: trainer/publish/publication.py.
"""

import logging
import time

from slimebus.cli.config import RunConfig
from slimebus.cli.spans import Spans
from trainer.batches.step_batch import NOT_YET, StepBatch, StepPlan, share_plan
from trainer.broker_session import BrokerSession
from trainer.checkpoint.schedule import CheckpointSchedule
from trainer.model.policy import Policy
from trainer.publish.publication import Publication
from trainer.stop_request import StopRequest

log = logging.getLogger("trainer")

TURN_S = 60.0
"""How often the ranks that wait for rank 0 hear that it still waits for a batch; far below the timeout of their collectives."""
LOOK_S = 0.2
"""How often rank 0 looks whether it is asked to stop."""


def train(
    policy: Policy,
    session: BrokerSession | None,
    publication: Publication,
    checkpoints: CheckpointSchedule,
    config: RunConfig,
    spans: Spans,
    stop: StopRequest,
) -> None:
    """Train from where the newest checkpoint ends to the last step, or until `stop` is made."""
    start = checkpoints.resume(policy)
    version = start.version
    publication.begin(version)
    checkpoints.lineage = publication.lineage
    if session:
        checkpoints.check_newest()
        session.begin(start, publication, policy.model.vocab_size)
        checkpoints.check_newest()
    publication.publish(version)
    with stop.deferred():
        for step in range(start.step, config.rollout.num_rollout):
            with spans("wait", step=step) as wait:
                batch, plan = next_batch(session, step, config.rollout.num_steps_per_rollout, stop)
            if plan.stops:
                checkpoints.save_and_stop(policy, step, version)
                return
            with spans("train", step=step) as work:
                metrics = policy.train(batch.groups if batch else None, num_steps=plan.num_steps, version=version)
                policy.refresh_reference(step + 1)
            with spans("publish", step=step) as copy:
                if plan.publishes:
                    version += 1
                    publication.publish(version)
                    copy.about["version"] = version
            with spans("save", step=step) as save:
                saved = checkpoints.save_if_due(policy, step + 1, version)
            if session and batch:
                times = {"wait_s": wait.seconds, "train_s": work.seconds, "publish_s": copy.seconds, "save_s": save.seconds}
                with spans("commit", step=step):
                    session.commit(step, batch, saved, metrics | times)
    checkpoints.close(policy)
    if session:
        session.finish()
    publication.finish()


def next_batch(session: BrokerSession | None, step: int, max_steps: int, stop: StopRequest) -> tuple[StepBatch | None, StepPlan]:
    """Rank 0's batch of `step`, None elsewhere, and on every rank how it is trained; however long samples take to come."""
    while True:
        batch, until = None, time.monotonic() + TURN_S
        while session and not batch and not stop.is_made and time.monotonic() < until:
            batch = session.take(step, LOOK_S)
        mine = StepPlan(stops=True) if stop.is_made else batch.plan(max_steps) if batch else NOT_YET
        plan = share_plan(mine if session else None)
        if plan != NOT_YET:
            return batch, plan
