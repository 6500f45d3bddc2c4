"""What goes wrong, and how: one function a fault, chosen by chance until the world is calm."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from simulation.actor import Actor, Request
from simulation.broker_process import CRASH_POINTS
from simulation.rude import WideName
from simulation.trainer import Checkpoint, Trainer
from simulation.worker import Worker

from slimebus.bus import messages as m

if TYPE_CHECKING:
    from simulation.world import World


def kill_broker(world: "World") -> None:
    """Between two turns."""
    world.broker.crash(down_s=world.random.expovariate(0.5))


def lose_broker_for_a_minute(world: "World") -> None:
    """Its machine is replaced: every client counts as silent and every lease is over when it is back."""
    world.broker.crash(down_s=60.0)


def kill_broker_within_a_turn(world: "World") -> None:
    """Between decide and commit, in the commit, between commit and replies, or among the replies of the next turn."""
    world.broker.crash_at = world.random.choice(CRASH_POINTS)


def cut_power_of_broker(world: "World") -> None:
    """With durability os the last transactions are lost as a whole suffix; with fsync, none that was answered."""
    torn = world.random.randint(1, 8) if world.scenario.durability == "os" else 0
    world.broker.crash(down_s=world.random.expovariate(0.5), torn=torn)
    if torn and world.account.finished_steps is not None:  # the end may be lost: `slimebus status` says that no trainer takes part
        world.trainer.crash()


def stop_broker(world: "World") -> None:
    """SIGSTOP, a machine that sleeps, a disk that is stuck."""
    world.broker.stop_for(world.random.choice([1.0, 8.0, 40.0]))


def kill_worker(world: "World") -> None:
    """kill -9; restarted under its name."""
    world.random.choice(world.workers).crash()


def stop_worker(world: "World") -> None:
    """SIGSTOP for less or longer than a lease."""
    world.random.choice(world.workers).stop_for(world.random.uniform(1, 15))


def replace_worker(world: "World") -> None:
    """A worker ends for good, another of a new name comes."""
    gone = world.random.choice(world.workers)
    gone.die()
    world.replace_worker(gone, world.new_worker())


def preempt_worker(world: "World") -> None:
    """SIGTERM; another comes in its place."""
    gone = world.random.choice(world.workers)
    gone.preempt()
    world.replace_worker(gone, world.new_worker())


def storm_of_workers(world: "World") -> None:
    """Many join at once and leave again, in good order or not."""
    for _ in range(world.random.randint(3, 12)):
        worker = world.new_worker()
        world.guests.append(worker)
        worker.later(world.random.uniform(0, 10), world.random.choice([worker.die, worker.preempt]))


def kill_trainer(world: "World") -> None:
    """kill -9; it goes on from its newest checkpoint."""
    world.trainer.crash()


def rewind_trainer(world: "World") -> None:
    """It goes on from an older checkpoint that it kept, or all are lost and it begins anew, before steps whose samples are freed."""
    world.checkpoints = world.checkpoints[: world.random.randint(0, len(world.checkpoints))] or [Checkpoint()]
    world.trainer.crash()


def stop_trainer(world: "World") -> None:
    """SIGSTOP."""
    world.trainer.stop_for(world.random.uniform(1, 20))


def second_trainer(world: "World") -> None:
    """Another trainer comes, of another name or of the same, while the first one lives on; by mistake or with --take-over."""
    old = world.trainer
    if not old.is_done:
        Trainer(world, world.random.choice(["t2", old.name]), take_over=world.random.random() < 0.5)


def second_worker(world: "World") -> None:
    """Another worker of a name comes while the first one lives on; by mistake or with --take-over."""
    old = world.random.choice(world.workers)
    Worker(world, old.name, old.plan, take_over=world.random.random() < 0.5)


def restart_everything(world: "World") -> None:
    """The whole site loses its power, and what was written is kept: everyone starts again, in any order."""
    world.broker.crash(down_s=world.random.uniform(0, 10))
    for process in [world.trainer, *world.workers]:
        process.crash()


def cut_network(world: "World") -> None:
    """One process and the broker do not hear each other for a while."""
    world.network.cut(world.random.choice([world.trainer, *world.workers]).name, world.random.uniform(1, 12))


def fill_disk(world: "World") -> None:
    """No room for a while: for samples, or for anything."""
    disk = world.broker.disk
    disk.is_nearly_full, disk.is_full = True, world.random.random() < 0.7

    def free() -> None:
        disk.is_full = disk.is_nearly_full = False

    world.timeline.later(world.random.uniform(0.5, 8), free)


def jump_broker_clocks(world: "World") -> None:
    """Both clocks of the broker's machine jump; not back: a broker that lost its last writes goes by the time of day."""
    world.clock_jumps.append(world.now)
    world.broker.clock.monotonic_ahead_s += world.random.choice([5.0, 100.0, 1e5])
    world.broker.wall_ahead_s += world.random.uniform(0, 50)


def drift_clock(world: "World") -> None:
    """The clock of a worker's or trainer's machine runs up to a fifth too fast or too slow."""
    world.clock_rates[world.random.choice([world.trainer, *world.workers]).name] = world.random.uniform(0.8, 1.2)


class Operator(Actor):
    """A person at a command line: `slimebus set`, once, then gone."""

    role = "client"

    def __init__(self, world: "World", name: str, settings: dict[str, m.Scalar]) -> None:
        self.settings = settings
        super().__init__(world, name)

    def begin(self, welcome: m.Welcome) -> None:
        self.ask(m.Set(key=self.instance, settings=self.settings), lambda *_: self.leave())

    def refused(self, error: m.Error, request: Request) -> None:
        self.die()


def change_settings(world: "World") -> None:
    """Somebody sets another bound, batch or group size while it runs."""
    rng = world.random
    if rng.random() < 0.5:
        bound = rng.choice([0.0, 1.0, 2.0, 4.0, float("inf")])
        world.bounds.add(bound)
        settings: dict[str, m.Scalar] = {"max_staleness": bound}
    elif rng.random() < 0.6:
        size = rng.choice([1, 2, 3, 4])
        world.batch_sizes.add(size)
        settings = {"rollout_batch_size": size}
    else:
        settings = {"n_samples_per_prompt": rng.choice([1, 2, 3])}
    world.trace(f"somebody sets {settings}")
    Operator(world, f"operator-{world.timeline.serial()}", settings)


def join_under_a_wide_name(world: "World") -> None:
    """A name that fits by its characters and is too long by its bytes."""
    WideName(world)


FAULTS: dict[str, tuple[Callable[["World"], None], int]] = {
    fault.__name__: (fault, weight)
    for fault, weight in (
        (kill_broker, 3),
        (lose_broker_for_a_minute, 1),
        (kill_broker_within_a_turn, 4),
        (cut_power_of_broker, 1),
        (stop_broker, 1),
        (kill_worker, 4),
        (stop_worker, 2),
        (replace_worker, 1),
        (preempt_worker, 1),
        (storm_of_workers, 1),
        (kill_trainer, 3),
        (rewind_trainer, 2),
        (stop_trainer, 1),
        (second_trainer, 2),
        (second_worker, 2),
        (restart_everything, 1),
        (cut_network, 2),
        (fill_disk, 1),
        (jump_broker_clocks, 1),
        (drift_clock, 1),
        (change_settings, 2),
        (join_under_a_wide_name, 1),
    )
}
"""Every fault and how often it happens, beside the others."""


def schedule_faults(world: "World", only: str = "") -> None:
    """Have faults happen until the world is calm, all kinds of them or `only` one."""
    names = [only] if only else list(FAULTS)
    weights = [FAULTS[name][1] for name in names]

    def inject_fault() -> None:
        if world.is_calm:
            return
        name = world.random.choices(names, weights)[0]
        world.trace(f"FAULT {name}")
        world.faults[name] += 1
        FAULTS[name][0](world)
        schedule_next()

    def schedule_next() -> None:
        world.timeline.later(world.random.expovariate(1 / world.scenario.fault_every_s), inject_fault)

    schedule_next()
