"""The bounds of the state machine: what is in use, how much there may be, how often the bound was hit."""

from typing import Any

from broker.state.table import State
from slimebus.errors import SlimebusError


def hit(state: State, name: str, text: str) -> SlimebusError:
    """The `busy` error of a bound that is reached, counted under its name."""
    state.bound_hits[name] = state.bound_hits.get(name, 0) + 1
    return SlimebusError(f"{text} (broker.{name})", code="busy", retryable=True)


def has_too_many_parked(state: State, name: str) -> bool:
    """True when a client has more lease requests waiting than it may. They are counted only where there are more than usual."""
    limit = state.rules.max_parked_per_client
    if len(state.parked_leases) < limit + len(state.clients):
        return False
    return sum(1 for client, _ in state.parked_leases if client == name) >= limit


def bounds(state: State) -> dict[str, dict[str, Any]]:
    """Name -> limit, used, hits."""
    rules, hits = state.rules, state.bound_hits
    used = {
        "max_clients": (rules.max_clients, len(state.clients)),
        "max_parked": (rules.max_parked, len(state.parked_leases)),
        "max_parked_per_client": (rules.max_parked_per_client, None),
        "buffer_capacity": (rules.capacity, state.num_held),
    }
    return {name: {"limit": limit, "used": now, "hits": hits.get(name, 0)} for name, (limit, now) in used.items()}
