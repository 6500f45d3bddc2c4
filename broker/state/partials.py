"""Partial groups: what a worker had made of a group when it had to leave, kept for whoever samples the group next.

A partial is a group's samples, some finished and some cut off, in the frames of a put. It lives beside the prompt from the
give-back until samples of the group are accepted, the group ends, or it can no longer be trained: then its tokens are wasted.
"""

from broker.state import admission
from broker.state.effects import Event, StoredPartial
from broker.state.groups import Group
from broker.state.table import State
from slimebus.errors import ProtocolError
from slimebus.messages import NO_VERSION, GiveBack


def keep(state: State, event: Event, group: Group, back: GiveBack) -> None:
    """Store what a leaving worker made of a group it holds, in place of an older partial."""
    versions = [version for s in back.samples for version, _ in s.versions]
    if max(versions, default=NO_VERSION) > state.meta.version:
        raise ProtocolError(f"partial of group {group.id}: tokens of version {max(versions)}, but {state.meta.version} is the newest")
    group.partial_frames = 1 + len(event.bulk)
    group.partial_tokens = sum(s.num_tokens for s in back.samples)
    group.partial_oldest = min((s.oldest_version for s in back.samples if s.oldest_version != NO_VERSION), default=NO_VERSION)
    group.partial_newest = max(versions, default=NO_VERSION)
    group.partial_steps = state.steps_behind(group.partial_newest) if group.partial_newest != NO_VERSION else 0
    state.save("partials", group.id, [event.body, *event.bulk])
    state.tally(state.meta.counted, "partials kept")


def offer(state: State, group: Group, *, is_wanted: bool) -> None:
    """Before a lease: let go of a partial that its taker cannot continue, or that would be too stale when it is trained."""
    if not group.partial_frames:
        return
    age = state.version_of(admission.step_of_next(state)) - group.partial_oldest
    if not is_wanted:
        waste(state, group, "partial for a worker that continues none")
    elif group.partial_oldest != NO_VERSION and age > state.rules.max_staleness:
        waste(state, group, "partial grew too stale")


def frames(group: Group) -> list[StoredPartial]:
    """The bulk part of a lease reply that carries the partial of a group; empty when it has none."""
    return [StoredPartial(group.id)] if group.partial_frames else []


def used(state: State, group: Group) -> None:
    """Samples of the group were accepted: they hold what the partial had."""
    if group.partial_frames:
        state.tally(state.meta.counted, "partials continued")
        state.forget_partial(group)


def waste(state: State, group: Group, reason: str) -> None:
    """Let go of a partial, counted."""
    if group.partial_frames:
        state.wasted(reason, 0, group.partial_tokens)
        state.forget_partial(group)


def rewind(state: State, step: int, version: int) -> None:
    """Let go of every partial with tokens of a version that the new timeline never had: newer, or of its number and trained further."""
    for group in state.groups.by_id.values():
        if group.partial_frames and (group.partial_newest > version or group.partial_steps > step):
            waste(state, group, "partial of the abandoned timeline")
