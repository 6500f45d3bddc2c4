"""What every rank must know of a step before it is trained; rank 0 has it from the broker."""

import msgspec

from trainer import parallel


class StepPlan(msgspec.Struct, frozen=True):
    """How a batch is trained: in so many optimizer steps, and whether a version is published after it."""

    num_parts: int
    publishes: bool


def share_plan(plan: StepPlan | None) -> StepPlan:
    """Rank 0's plan on every rank; the others give None."""
    payload = None if plan is None else msgspec.msgpack.encode(plan)
    return msgspec.msgpack.decode(parallel.broadcast_bytes(payload), type=StepPlan)
