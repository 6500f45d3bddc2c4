"""What a seed decides before anything happens: the run's rules, its prompts, its workers and how rough it will be."""

import random
from typing import Literal

import msgspec
from numbered_prompts import NumberedPrompts

from broker.state.rules import HeldOutSet, Rules

Durability = Literal["fsync", "os"]
SLOW_SHARE = 0.01
"""Of the worlds in which a group takes an hour. One costs about 20 times as much as another."""
WIDE = "\U0001f422"
"""A character of four bytes: names are bounded in characters here and in bytes there."""


class WorkerPlan(msgspec.Struct, frozen=True):
    """A worker: mean seconds a group takes it, groups it works on at once, whether it comes back after `not_joined`.

    is_rude: it puts what nobody can train.
    """

    mean_s: float
    capacity: int
    rejoins: bool
    is_rude: bool = False


class Scenario(msgspec.Struct, frozen=True):
    """Everything about a world that does not change while it runs."""

    rules: Rules
    source: NumberedPrompts
    durability: Durability
    workers: list[WorkerPlan]
    needs_weights: bool
    roughness: float
    calm_at: float
    fault_every_s: float
    poison: int
    slowness: float = 1.0
    """How many times longer everything takes but the network and the clients' patience."""
    resend_s: float = 5.0
    wait_s: float = 12.0
    """How long a request asks to be kept waiting: longer than `resend_s`, so that it is repeated meanwhile."""
    has_wide_names: bool = False
    more_steps: int = 0
    """Once the run is finished, somebody has it go on for so many steps more."""

    def name_of(self, number: int) -> str:
        """The name of a worker."""
        return f"{WIDE * 28}{number}" if self.has_wide_names else f"w{number}"

    def worker_plan(self, rng: random.Random) -> WorkerPlan:
        """A fast, a usual or a slow worker."""
        return worker_plan(rng, self.slowness)


def draw(rng: random.Random, *, faults: bool) -> Scenario:
    """A scenario; `poison`: every so many prompts one kills whatever works on it (0: none)."""
    num_steps = rng.choice([6, 10, 10, None])
    needs_weights = rng.random() < 0.9
    slowness = 1000.0 if rng.random() < SLOW_SHARE else 1.0
    is_slow = slowness > 1
    if is_slow:
        num_steps = 3
    return Scenario(
        rules=_rules(rng, num_steps, 12.0 if is_slow else 1.0, evaluates=needs_weights and rng.random() < 0.5),
        source=NumberedPrompts(rng.randint(8, 40), rng.choice([1, 2])) if num_steps is None else NumberedPrompts(1000, 3),
        durability=rng.choice(["fsync", "fsync", "os"]),
        workers=[worker_plan(rng, slowness) for _ in range(rng.choice([1, 2, 5]))],
        needs_weights=needs_weights,
        roughness=rng.choice([0.0, 0.5, 1.0, 3.0]) if faults else 0.0,
        calm_at=rng.uniform(20, 80) * (100 if is_slow else 1) if faults else 0.0,
        fault_every_s=rng.choice([1.5, 4.0, 8.0]) * (100 if is_slow else 1),
        poison=rng.choice([0, 0, 13]) if faults else 0,
        slowness=slowness,
        resend_s=60.0 if is_slow else 5.0,
        wait_s=600.0 if is_slow else 12.0,
        has_wide_names=rng.random() < 0.2,
        more_steps=rng.choice([0, 0, 3]) if num_steps else 0,
    )


def worker_plan(rng: random.Random, slowness: float) -> WorkerPlan:
    """A fast, a usual or a slow worker."""
    return WorkerPlan(rng.choice([0.3, 1.0, 4.0]) * slowness, rng.choice([1, 2, 5]), rng.random() < 0.5, rng.random() < 0.2)


def _rules(rng: random.Random, num_steps: int | None, patience: float, *, evaluates: bool) -> Rules:
    batch_size = rng.choice([1, 2, 4])
    return Rules(
        batch_size=batch_size,
        samples_per_prompt=rng.choice([1, 2]),
        max_staleness=rng.choice([0, 1, 2, 3, float("inf")]),
        publish_interval=rng.choice([1, 1, 2]),
        num_steps=num_steps,
        on_stale=rng.choice(["requeue", "drop"]),
        lease_s=5.0 * patience,
        heartbeat_s=1.0 * patience,
        client_timeout_s=6.0 * patience,
        max_attempts=4,
        buffer_capacity=rng.choice([4, 16, 64]),
        eval_datasets={"held": HeldOutSet(num_prompts=3, num_samples=2)} if evaluates else {},
        eval_interval=rng.choice([0, 2]),
        over_sampling=rng.choice([0, 0, 2 * batch_size]),
        masks_offpolicy=rng.random() < 0.7,
        max_freed_bytes=1 if batch_size > 1 else 1 << 20,
    )
