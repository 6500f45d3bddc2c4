"""The hard bound: no group is handed out that is staler than `max_staleness`, and what happens to those that grew too old.

A group made by version w is fresh enough up to the last step with a version of at most w + max_staleness: its deadline.
"""

from broker.state import transitions
from broker.state.broker_state import State
from broker.state.groups import Group
from slimebus.bus.messages import NO_VERSION


def is_stale(state: State, group: Group, step: int) -> bool:
    """True when some trainable token of the group would be more than `max_staleness` versions old in `step`."""
    return group.oldest_version != NO_VERSION and state.version_of(step) - group.oldest_version > state.rules.max_staleness


def remove_stale_ready_groups(state: State, step: int) -> None:
    """Take every ready group that is too old for `step`, and so for all later steps, out of the buffer."""
    seen = (state.meta.lineage, state.version_of(step), state.rules.max_staleness)
    if state.stale_removed_at == seen:
        return
    state.stale_removed_at = seen
    for group in state.groups.every_ready():
        if is_stale(state, group, step):
            apply_on_stale(state, group)


def apply_on_stale(state: State, group: Group, reason: str = "stale") -> None:
    """What `on_stale` says."""
    transitions.apply_transition(state, group, "dropped" if state.rules.on_stale == "drop" else "stale", reason)


def end_stale_leases(state: State, step: int, reason: str) -> None:
    """End the leases of groups begun by versions too old for `step`: their workers learn it with the next heartbeat.

    Where a later lease can train what it adds to them (masks_offpolicy), they are recalled with what there is.
    """
    for group in state.groups.leased_for_training():
        if last_fresh_step(state, first_version_of(state, group)) < step and not group.lease.is_recalled:
            if state.rules.masks_offpolicy:
                recall_lease(state, group)
            else:
                apply_on_stale(state, group, reason)


def first_version_of(state: State, group: Group) -> int:
    """The version that made the first trained tokens of a group in flight: of its lease, or of the partial it continues."""
    partial, version = group.partial.oldest_version, group.lease.version
    return version if partial == NO_VERSION or state.rules.masks_offpolicy else min(version, partial)


def recall_lease(state: State, group: Group) -> None:
    """Have the worker give a leased group back with what there is of it, within the lease time."""
    state.leases.recall(group, state.now + state.rules.lease_s)
    state.changed("groups", group.id)
    state.tally(state.meta.counted, "leases recalled")
    state.notify()


def end_recalled_lease(state: State, lease: int) -> None:
    """A recalled lease was not given back in time."""
    apply_on_stale(state, state.groups.by_lease[lease], "recalled and not given back")


def last_fresh_step(state: State, version: int) -> float:
    """The last step in which a group made by `version` is fresh enough: its deadline."""
    if version == NO_VERSION:
        return float("inf")
    interval, meta = state.rules.publish_interval, state.meta
    period = version + state.rules.max_staleness - meta.pace_version + meta.pace_step // interval
    return (period + 1) * interval - 1
