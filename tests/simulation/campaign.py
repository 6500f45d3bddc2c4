"""Many seeds, and what became of each."""

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from multiprocessing import Pool
from typing import Literal

import msgspec
from simulation.actor import Broken
from simulation.engine_mutations import ENGINE_MUTATIONS
from simulation.engine_world import EngineWorld
from simulation.mutations import MUTATIONS, applied
from simulation.world import World

SEEDS_PER_MUTATION = 400
What = Literal["broker", "engines"]
WORLDS: dict[What, type[World] | type[EngineWorld]] = {"broker": World, "engines": EngineWorld}
MUTATIONS_OF = {"broker": MUTATIONS, "engines": ENGINE_MUTATIONS}


class Outcome(msgspec.Struct, frozen=True):
    """How a seed ended: `broken` is empty when everything held; `recent` are its last events."""

    seed: int
    events: int
    seconds: float
    steps: int
    faults: dict[str, int]
    broken: str = ""
    recent: list[str] = []


def run_seed(seed: int, *, what: What = "broker", is_verbose: bool = False) -> Outcome:
    """One world from beginning to end. An exception in the state machine is a broken promise too."""
    world = WORLDS[what](seed, is_verbose=is_verbose)
    broken = ""
    try:
        world.run()
    except Exception as problem:  # noqa: BLE001 - whatever it is, it is told with its seed
        broken = f"{type(problem).__name__}: {problem}"
    return Outcome(seed, world.events, world.now, world.num_steps, dict(world.faults), broken, list(world.recent) if broken else [])


def run_seeds(seeds: Iterable[int], *, jobs: int, what: What = "broker") -> Iterator[Outcome]:
    """Each seed's outcome, as they come."""
    run = partial(run_seed, what=what)
    if jobs == 1:
        yield from map(run, seeds)
        return
    with Pool(jobs) as pool:
        yield from pool.imap_unordered(run, seeds, chunksize=8)


def seeds_to_catch(name: str, limit: int = SEEDS_PER_MUTATION, *, what: What = "broker") -> tuple[int, str]:
    """How many seeds it takes to catch a mutation, and the promise that was broken; 0 when `limit` seeds do not.

    An exception that is none of ours catches nothing: it may be the mutation's own, which no longer fits what it replaces.
    """
    with applied(MUTATIONS_OF[what][name]):
        for seed in range(limit):
            broken = run_seed(seed, what=what).broken
            if broken:
                return (seed + 1 if broken.startswith(Broken.__name__) else 0), broken
    return 0, ""


def faults_of(outcomes: Iterable[Outcome]) -> Counter[str]:
    """How often each fault happened."""
    total: Counter[str] = Counter()
    for outcome in outcomes:
        total.update(outcome.faults)
    return total
