"""The simulation finds faults: each deliberate one is caught within a few seeds."""

import pytest
from simulation.campaign import SEEDS_PER_MUTATION, seeds_to_catch
from simulation.mutations import MUTATIONS


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_simulation_catches(name: str) -> None:
    count, broken = seeds_to_catch(name)
    assert count, f"{name!r}: {broken or f'not caught in {SEEDS_PER_MUTATION} seeds'}"
