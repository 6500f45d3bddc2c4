"""Many seeds of the simulated world."""

import subprocess
import sys
from pathlib import Path

import pytest
from simulation.campaign import run_seed
from simulation.faults import FAULTS
from simulation.trainer import Checkpoint, Trainer
from simulation.world import World

from broker.state.effects import Address, Event
from slimebus.bus import messages as m

SEEDS = 1000
PER_TEST = 20
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("first", range(0, SEEDS, PER_TEST))
def test_every_prompt_is_trained_once_or_accounted_for_under_faults(base: int, first: int) -> None:
    for seed in range(base + first, base + first + PER_TEST):
        outcome = run_seed(seed)
        if outcome.broken:
            told = "\n".join([*outcome.recent, outcome.broken])
            pytest.fail(f"seed {seed}, event {outcome.events} (again: bin/simtest --seed {seed} --trace):\n{told}")


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_alone_does_no_harm(name: str) -> None:
    for seed in range(3):
        World(seed, only=name).run()


def test_without_faults_only_staleness_wastes() -> None:
    for seed in range(40):
        world = World(seed, faults=False)
        goes_on = bool(world.scenario.more_steps)
        world.run()
        allowed = {"stale", "the source ended within a batch"}
        if goes_on or world.scenario.rules.over_sampling:  # it crosses the end of the run, or the answer that takes a surplus lease back
            allowed.add("put after the lease was lost")
        assert world.broker.machine is not None
        assert set(world.broker.machine.state.meta.waste) <= allowed, f"seed {seed}: {world.broker.machine.state.meta.waste}"


def test_workers_come_back_to_a_trainer_that_begins_anew_long_after_they_left() -> None:
    world = World(0, faults=False)
    while not world.trainer.is_done:
        world.step()
    left_at, world.checkpoints = world.now, [Checkpoint()]
    while world.now < left_at + 60:
        world.step()
    world.trainer = Trainer(world, "t")
    world.run()
    assert world.trainer.is_done


@pytest.mark.parametrize("lists_leases", [True, False])
def test_a_heartbeat_is_no_word_for_its_leases_where_the_broker_asks_for_their_list(lists_leases: bool) -> None:
    """It crossed a grant, say: docs/protocol.md says of such an answer that nothing was extended."""
    world = World(0, faults=False)
    while not any(worker.held for worker in world.workers):
        world.step()
    worker = next(worker for worker in world.workers if worker.held)
    to = Address(worker.instance.encode(), 1000)
    world.invariants.arrived(Event(to=to, sender=worker.name, epoch=worker.epoch, run="sim", message=worker.beat()))
    world.invariants.beaten(to, m.HeartbeatReply(list_leases=lists_leases))
    assert (world.invariants._heard.keys() >= worker.held.keys()) != lists_leases


@pytest.mark.parametrize("is_torn_off", [True, False])
def test_prompts_that_were_freed_before_a_resume_count_as_lost_unless_the_power_cut_took_the_resume_along(is_torn_off: bool) -> None:
    world = World(0, faults=False)
    while not world.trainer.trained:
        world.step()
    watch, lineage = world.invariants, "never stored" if is_torn_off else world.trainer.lineage
    watch._freed_before[lineage] = {"freed"}
    watch.started()
    assert ("freed" in watch._freed) == is_torn_off


def test_prompts_that_a_broker_without_any_record_skips_are_not_lost() -> None:
    world = World(0, faults=False)
    world.account.lost_suffix = True
    machine, watch = world.broker.machine, world.invariants
    assert machine is not None
    asked = [
        m.Hello(role="trainer", instance="i"),
        m.Resume(step=1, version=world.version_of(1), lineage="after the power cut", parent="before it"),
    ]
    for number, message in enumerate(asked):
        epoch = machine.state.clients["t9"].epoch if number else 0
        event = Event(to=Address(b"i", number + 1), sender="t9", epoch=epoch, run="sim" if number else "", message=message)
        watch.before(machine, [event])
        watch.applied(machine, [event], machine.apply([event], 0.0))
    assert machine.state.meta.cursor == world.rules.batch_size
    watch._check_prompts(machine.state)


@pytest.mark.parametrize("what", [[], ["--engines"]])
def test_a_seed_replays_to_the_same_event_in_another_process(what: list[str]) -> None:
    """Strings hash differently in each process; nothing may depend on it."""
    command = [sys.executable, str(ROOT / "tests" / "simulation" / "simtest.py"), *what, "--seed", "7", "--trace"]
    told = [
        subprocess.run(command, env={"PYTHONHASHSEED": seed, "PATH": ""}, capture_output=True, text=True, check=True, timeout=60).stdout
        for seed in ("1", "2")
    ]
    assert told[0] == told[1]
    assert len(told[0].splitlines()) > 100
