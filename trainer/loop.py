"""The algorithm of a run, on one screen.

    publish v0;  for each step:  take a batch -> advantages and loss -> optimizer -> publish -> checkpoint -> commit

Every rank runs this; rank 0 alone has a `bus` (the broker's batches). Which ranks serve weights: trainer/publishing.py.
"""

from typing import TYPE_CHECKING

from slimebus.config import RunConfig
from slimebus.spans import Spans
from trainer.bus import Bus
from trainer.checkpoints import Checkpoints
from trainer.step_plan import share_plan

if TYPE_CHECKING:
    from trainer.policy import Policy
    from trainer.publishing import Publishing


def train(policy: "Policy", bus: Bus | None, publishing: "Publishing", checkpoints: Checkpoints, config: RunConfig, spans: Spans) -> None:
    """Train from where the newest checkpoint ends to the last step."""
    steps = config.rollout.num_rollout
    first, version = checkpoints.resume(policy)
    publishing.begin(version)
    if bus:
        bus.begin(first, version, publishing)
    publishing.publish(version)
    for step in range(first, steps):
        with spans("wait", step=step) as wait:
            batch = bus.take(step) if bus else None
        with spans("train", step=step) as work:
            plan = share_plan(batch.plan(config.rollout.num_steps_per_rollout) if batch else None)
            for part in batch.parts(plan.num_parts) if batch else [None] * plan.num_parts:
                metrics = policy.train(part)
        with spans("publish", step=step) as copy:
            if plan.publishes:
                version += 1
                publishing.publish(version)
                copy.about["version"] = version
        with spans("save", step=step) as save:
            saved = checkpoints.save_if_due(policy, step + 1, version, bus.confirm if bus else lambda: None)
        if bus and batch:
            times = {"wait_s": wait.seconds, "train_s": work.seconds, "publish_s": copy.seconds, "save_s": save.seconds}
            with spans("commit", step=step):
                bus.commit(step, batch, saved, metrics | times)
    checkpoints.close(policy)
    if bus:
        bus.finish()
    publishing.finish()
