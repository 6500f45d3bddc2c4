"""The critic's life, on one screen.

    for each read:  new groups -> their values, put at once;  when a batch of groups is together:  returns -> value loss -> checkpoint

Every rank runs this; rank 0 alone has a `session`. A group gets the values of the weights that are there when it comes; the batch that it
is in here need not be the policy's. The position is that of a checkpoint: what lies behind it is read again after a crash, and keeps its
values.
"""

import time

import msgspec

from slimebus.config import RunConfig
from slimebus.telemetry.spans import Spans
from trainer.batches.batch import TrainingGroup
from trainer.checkpoint.schedule import CheckpointSchedule
from trainer.critic.critic import Critic
from trainer.critic.session import CriticSession
from trainer.model import parallel
from trainer.session.stop_request import BROADCAST_INTERVAL_S, StopRequest

POLL_S = 0.5
"""How often rank 0 looks whether it is asked to stop."""


class CriticPlan(msgspec.Struct, frozen=True):
    """What all ranks do next: give new groups their values, train in so many optimizer steps, or stop. position: of what was read."""

    has_new: bool = False
    has_values: bool = False
    num_steps: int = 0
    is_full: bool = False
    position: int = 0
    stops: bool = False


NOT_YET = CriticPlan()
"""Nothing came for a while; said so often that no other rank's broadcast times out."""


def run_critic_loop(
    critic: Critic, session: CriticSession | None, checkpoints: CheckpointSchedule, config: RunConfig, spans: Spans, stop: StopRequest
) -> None:
    """Give values and learn until the run is over, or until `stop` is made."""
    start = checkpoints.resume(critic)
    step = start.step
    if session:
        session.begin(start.position, critic.model.vocab_size)
    waited = 0.0
    with stop.deferred():
        while True:
            with spans("wait", step=step) as wait:
                new, plan = next_groups(session, config.rollout.num_steps_per_rollout, stop)
            waited += wait.seconds
            if plan.stops:
                checkpoints.save_and_stop(critic, step, 0)
                return
            with spans("values", step=step):
                values = critic.values(new) if plan.has_values else []
                if session and plan.has_new:
                    session.put(new or [], values)
            if plan.is_full:
                with spans("train", step=step) as work:
                    batch = session.batch() if session else None
                    metrics = critic.train(batch, num_steps=plan.num_steps) if plan.num_steps else {}
                step, checkpoints.position = step + 1, plan.position
                with spans("save", step=step) as save:
                    checkpoints.save_if_due(critic, step, 0)
                if session:
                    session.record(step - 1, metrics | {"wait_s": waited, "train_s": work.seconds, "save_s": save.seconds})
                waited = 0.0


def next_groups(session: CriticSession | None, max_steps: int, stop: StopRequest) -> tuple[list[TrainingGroup] | None, CriticPlan]:
    """Rank 0's new groups, None elsewhere, and on every rank what is done next; however long groups take to come."""
    while True:
        new, mine, until = None, NOT_YET, time.monotonic() + BROADCAST_INTERVAL_S
        while session and mine == NOT_YET and time.monotonic() < until:
            new = [] if stop.is_made else session.take_groups(POLL_S)
            mine = CriticPlan(stops=True) if stop.is_made else plan_for(session, new, max_steps)
        plan = parallel.broadcast_value(mine if session else None, CriticPlan)
        if plan != NOT_YET:
            return new, plan


def plan_for(session: CriticSession, new: list[TrainingGroup], max_steps: int) -> CriticPlan:
    """What follows from what was read."""
    if session.has_new or session.is_full:
        num_steps = min(max_steps, session.num_trainable) if session.is_full else 0
        return CriticPlan(session.has_new, bool(new), num_steps, session.is_full, session.position)
    return CriticPlan(stops=True) if session.consumer.is_finished else NOT_YET
