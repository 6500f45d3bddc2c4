"""What a seed decides before anything happens: the run's rules, its prompts, its workers and how rough it will be."""

import random
from typing import Literal

import msgspec

from broker.state.rules import EvalDataset, Rules
from broker.state.table import Prompt

Durability = Literal["fsync", "os"]


class Numbers:
    """A prompt source (broker.state.table.PromptSource) of numbered prompts: `size` of them, `epochs` times over."""

    fingerprint = "numbers"

    def __init__(self, size: int, epochs: int) -> None:
        self.size, self.epochs = size, epochs

    @property
    def total(self) -> int:
        """Prompts of all epochs."""
        return self.size * self.epochs

    def id_at(self, position: int) -> str:
        """The prompt id of a position."""
        return f"{position // self.size}/{position % self.size}"

    def take(self, position: int) -> Prompt | None:
        """The prompt at a position, or None past the end."""
        if position >= self.total:
            return None
        return Prompt(self.id_at(position), position, b"prompt")

    def find(self, prompt_id: str) -> Prompt | None:
        """The prompt of an id."""
        epoch, row = map(int, prompt_id.split("/"))
        return self.take(epoch * self.size + row)


class WorkerPlan(msgspec.Struct, frozen=True):
    """A worker: mean seconds a group takes it, groups it works on at once, whether it comes back after `not_joined`."""

    mean_s: float
    capacity: int
    rejoins: bool


class Scenario(msgspec.Struct, frozen=True):
    """Everything about a world that does not change while it runs."""

    rules: Rules
    source: Numbers
    durability: Durability
    workers: list[WorkerPlan]
    needs_weights: bool
    roughness: float
    calm_at: float
    fault_every_s: float
    poison: int


def draw(rng: random.Random, *, faults: bool) -> Scenario:
    """A scenario; `poison`: every so many prompts one kills whatever works on it (0: none)."""
    num_steps = rng.choice([6, 10, 10, None])
    needs_weights = rng.random() < 0.9
    return Scenario(
        rules=_rules(rng, num_steps, evaluates=needs_weights and rng.random() < 0.5),
        source=Numbers(rng.randint(8, 40), rng.choice([1, 2])) if num_steps is None else Numbers(1000, 3),
        durability=rng.choice(["fsync", "fsync", "os"]),
        workers=[worker_plan(rng) for _ in range(rng.choice([1, 2, 5]))],
        needs_weights=needs_weights,
        roughness=rng.choice([0.0, 0.5, 1.0, 3.0]) if faults else 0.0,
        calm_at=rng.uniform(20, 80) if faults else 0.0,
        fault_every_s=rng.choice([1.5, 4.0, 8.0]),
        poison=rng.choice([0, 0, 13]) if faults else 0,
    )


def worker_plan(rng: random.Random) -> WorkerPlan:
    """A fast, a usual or a slow worker."""
    return WorkerPlan(rng.choice([0.3, 1.0, 4.0]), rng.choice([1, 2, 5]), rng.random() < 0.5)


def _rules(rng: random.Random, num_steps: int | None, *, evaluates: bool) -> Rules:
    return Rules(
        batch_size=rng.choice([1, 2, 4]),
        samples_per_prompt=rng.choice([1, 2]),
        max_staleness=rng.choice([0, 1, 2, 3, float("inf")]),
        hedge_after=rng.choice([0.0, 0.0, 2.0]),
        publish_interval=rng.choice([1, 1, 2]),
        num_steps=num_steps,
        on_stale=rng.choice(["requeue", "drop", "wait"]),
        lease_s=5.0,
        heartbeat_s=1.0,
        client_timeout_s=6.0,
        max_attempts=4,
        buffer_capacity=rng.choice([4, 16, 64]),
        eval_datasets={"held": EvalDataset(num_prompts=3, num_samples=2)} if evaluates else {},
        eval_interval=rng.choice([0, 2]),
    )
