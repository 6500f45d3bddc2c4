"""The simulation finds faults: each deliberate one is caught within a few seeds."""

import pytest
from simulation.campaign import MUTATIONS_OF, SEEDS_PER_MUTATION, What, seeds_to_catch


@pytest.mark.parametrize(("what", "name"), [(what, name) for what, mutations in MUTATIONS_OF.items() for name in mutations])
def test_the_simulation_catches(what: What, name: str) -> None:
    count, broken = seeds_to_catch(name, what=what)
    assert count, f"{name!r}: {broken or f'not caught in {SEEDS_PER_MUTATION} seeds'}"
