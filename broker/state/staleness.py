"""The hard bound: no group is handed out that is staler than `max_staleness`, and what happens to those that grew too old.

With `on_stale: wait` a batch is chosen so that every group in flight can still be trained in time. A group made by version w
can be trained until the last step whose version is at most w + max_staleness. The earliest of these deadlines go first, and the
batch waits when what would be left could not all fit in the steps before its deadlines (earliest deadline first is
optimal for unit jobs: Jackson 1955).
"""

from collections.abc import Iterable

from broker.state.groups import Group
from broker.state.table import State
from slimebus.messages import NO_VERSION


def is_stale(state: State, group: Group, step: int) -> bool:
    """True when some trainable token of the group would be more than `max_staleness` versions old in `step`."""
    return group.oldest_version != NO_VERSION and state.version_of(step) - group.oldest_version > state.rules.max_staleness


def sweep(state: State, step: int) -> None:
    """Take every ready group that is too old for `step`, and so for all later steps, out of the buffer."""
    seen = (state.version_of(step), state.rules.max_staleness)
    if state.swept == seen:
        return
    state.swept = seen
    for group in state.groups.first_ready(len(state.groups.ready)):
        if is_stale(state, group, step):
            remove_stale(state, group)


def remove_stale(state: State, group: Group) -> None:
    """What `on_stale` says; what is too old in spite of waiting is requeued."""
    if state.rules.on_stale == "drop":
        state.drop(group, "stale")
    else:
        state.requeue(group, "stale")


def choose(state: State, step: int) -> list[Group]:
    """The groups for `step`, first in, first out by admission; empty while there are too few, or some must be waited for."""
    size = state.rules.batch_size
    if len(state.groups.ready) < size:
        return []
    if state.rules.on_stale != "wait" or state.rules.max_staleness == float("inf"):
        return state.groups.first_ready(size)
    ready = sorted(state.groups.first_ready(len(state.groups.ready)), key=lambda g: _last_step(state, g.oldest_version))
    left = [*(g.oldest_version for g in ready[size:]), *(g.lease_version for g in state.groups.leased_for())]
    return ready[:size] if _can_all_be_trained(state, left, step + 1) else []


def _can_all_be_trained(state: State, versions: Iterable[int], step: int) -> bool:
    deadlines = sorted(_last_step(state, version) for version in versions)
    return all(count <= state.rules.batch_size * (deadline - step + 1) for count, deadline in enumerate(deadlines, 1))


def _last_step(state: State, version: int) -> float:
    """The last step in which a group made by `version` is fresh enough."""
    if version == NO_VERSION:
        return float("inf")
    interval, meta = state.rules.publish_interval, state.meta
    period = version + state.rules.max_staleness - meta.pace_version + meta.pace_step // interval
    return (period + 1) * interval - 1
