"""The hard bound: no group is handed out that is staler than `max_staleness`, and what happens to those that grew too old.

A group made by version w is fresh enough up to the last step whose version is at most w + max_staleness: its deadline. With
`on_stale: wait` the earliest deadlines are trained first, and a batch waits for groups in flight while that saves some of them:
while fewer would miss their deadline if all of them came back now than if the batch went without them. (Unit jobs with
deadlines: earliest first, leaving out what cannot be in time, loses the fewest; Jackson 1955, Moore 1968.)
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
    for group in state.groups.every_ready():
        if is_stale(state, group, step):
            remove_stale(state, group)


def remove_stale(state: State, group: Group, reason: str = "stale") -> None:
    """What `on_stale` says; what is too old in spite of waiting is requeued."""
    if state.rules.on_stale == "drop":
        state.drop(group, reason)
    else:
        state.requeue(group, reason)


def take_back(state: State, step: int, reason: str) -> None:
    """End the leases of groups begun by versions too old for `step`: their workers learn it with the next heartbeat."""
    for group in state.groups.leased_for_training():
        if last_step(state, begun_by(group)) < step:
            remove_stale(state, group, reason)


def begun_by(group: Group) -> int:
    """The version that made the first tokens of a group in flight: of its lease (the newer of two), or of the partial it continues."""
    version = group.lease_version if group.second is None else max(group.lease_version, group.second.version)
    return version if group.partial_oldest == NO_VERSION else min(version, group.partial_oldest)


def last_step(state: State, version: int) -> float:
    """The last step in which a group made by `version` is fresh enough: its deadline."""
    if version == NO_VERSION:
        return float("inf")
    interval, meta = state.rules.publish_interval, state.meta
    period = version + state.rules.max_staleness - meta.pace_version + meta.pace_step // interval
    return (period + 1) * interval - 1


def saved_by_waiting(state: State, step: int, size: int) -> int:
    """How many more groups could be trained in time if the batch of `step`, `size` groups, waited for those in flight."""
    ready = sorted(last_step(state, group.oldest_version) for group in state.groups.first_ready(len(state.groups.ready)))
    leased = [last_step(state, begun_by(group)) for group in state.groups.leased_for_training()]
    leased += [last_step(state, group.oldest_version) for group in state.groups.held.values()]
    if not leased:
        return 0
    return _num_late([*ready[size:], *leased], step + 1, size) - _num_late([*ready, *leased], step, size)


def _num_late(deadlines: Iterable[float], step: int, size: int) -> int:
    """How many of these miss their deadline when `size` of them are trained in each step from `step` on."""
    trained = late = 0
    for deadline in sorted(deadlines):
        if trained < size * (deadline - step + 1):
            trained += 1
        else:
            late += 1
    return late
