"""`bin/simtest`: simulated workers, trainers, disks, networks and engines around the real state machines; docs/proofs.md says more."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from simulation.campaign import Outcome, What

MAX_TOLD = 3
"""Broken seeds whose last events are printed."""
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/fixtures")]


@click.command()
@click.option("--seeds", default=200, show_default=True, help="[worlds] How many seeds to run.")
@click.option("--first", default=0, show_default=True, help="[number] The first of them.")
@click.option("--jobs", default=2, show_default=True, help="[processes] How many run at once.")
@click.option("--seed", type=int, help="[number] Run this one seed alone.")
@click.option("--trace", is_flag=True, help="With --seed: print every event as it happens.")
@click.option("--verbose", is_flag=True, help="Say what every seed did, and how often each fault happened.")
@click.option("--engines", is_flag=True, help="A worker's engines instead of the broker.")
@click.option("--mutations", is_flag=True, help="Put deliberate bugs in, one at a time, and count the seeds that it takes to catch each.")
def simtest(seeds: int, first: int, jobs: int, seed: int | None, trace: bool, verbose: bool, engines: bool, mutations: bool) -> None:
    """Run seeds of the simulation; exit with 1 when one of them breaks a promise, or a deliberate bug is not caught."""
    what: What = "engines" if engines else "broker"
    if mutations:
        sys.exit(0 if show_mutations(what) else 1)
    if seed is not None:
        sys.exit(0 if show_seed(seed, what, trace=trace) else 1)
    sys.exit(0 if show_seeds(range(first, first + seeds), what, jobs=jobs, verbose=verbose) else 1)


def show_seed(seed: int, what: "What", *, trace: bool) -> bool:
    """One seed, with its last events when it breaks."""
    from simulation.campaign import run_seed

    outcome = run_seed(seed, what=what, is_verbose=trace)
    if outcome.broken:
        tell(outcome, what, has_told=trace)
    else:
        print(f"seed {seed}: {outcome.steps} steps in {outcome.seconds:.0f} virtual seconds, {outcome.events} events, {outcome.faults}")
    return not outcome.broken


def show_seeds(seeds: range, what: "What", *, jobs: int, verbose: bool) -> bool:
    """Many seeds; the broken ones are told as they come."""
    from simulation.campaign import faults_of, run_seeds

    started, outcomes, num_broken = time.monotonic(), [], 0
    for outcome in run_seeds(seeds, what=what, jobs=jobs):
        outcomes.append(outcome)
        if outcome.broken:
            num_broken += 1
            tell(outcome, what, has_told=num_broken > MAX_TOLD)
        elif verbose:
            print(f"seed {outcome.seed}: {outcome.events} events, {outcome.seconds:.0f} s, {sum(outcome.faults.values())} faults")
    if verbose:
        print("\n".join(f"{count:8d}  {name}" for name, count in faults_of(outcomes).most_common()))
    took, hours = time.monotonic() - started, sum(o.seconds for o in outcomes) / 3600
    events, faults = sum(o.events for o in outcomes), sum(faults_of(outcomes).values())
    broken = sorted(o.seed for o in outcomes if o.broken)
    print(f"{len(outcomes)} seeds, {events} events, {hours:.1f} virtual hours, {faults} faults in {took:.0f} s")
    print(f"broken: {broken}" if broken else "every promise held")
    return not broken


def tell(outcome: "Outcome", what: "What", *, has_told: bool) -> None:
    """What was broken, where, and how to see it again."""
    if not has_told:
        print("\n".join(outcome.recent))
    print(f"seed {outcome.seed}, event {outcome.events}: {outcome.broken}")
    print(f"again, event by event: bin/simtest{' --engines' if what == 'engines' else ''} --seed {outcome.seed} --trace\n")


def show_mutations(what: "What") -> bool:
    """A table: mutation, seeds needed, what caught it."""
    from simulation.campaign import MUTATIONS_OF, SEEDS_PER_MUTATION, seeds_to_catch

    table = Table(title="deliberate bugs", title_justify="left")
    for name in ("mutation", "seeds", "caught as"):
        table.add_column(name, justify="right" if name == "seeds" else "left")
    found = {name: seeds_to_catch(name, what=what) for name in MUTATIONS_OF[what]}
    for name, (count, broken) in found.items():
        table.add_row(name, str(count) if count else f"[red]> {SEEDS_PER_MUTATION}[/]", broken[:90])
    Console().print(table)
    return all(count for count, _ in found.values())


if __name__ == "__main__":
    simtest()
