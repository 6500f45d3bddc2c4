"""Partial groups: what a worker had made of a group when it left, was out of time or was asked for it, kept for its next worker.

A partial is a group's samples, some finished and some cut off, in the frames of a put. It lives beside the prompt from the
give-back until samples of the group are accepted, the group ends, or it can no longer be trained: then its tokens are wasted.
"""

from collections.abc import Sequence

from broker.state import admission
from broker.state.broker_state import State
from broker.state.effects import StoredPayload
from broker.state.groups import Group, Partial
from slimebus.bus.messages import NO_VERSION
from slimebus.bus.sample_table import CheckedGroup, SampleFacts


def version_range(samples: Sequence[SampleFacts]) -> tuple[int, int]:
    """The oldest version over the trainable tokens of some samples and the newest over all of them; NO_VERSION where there is none."""
    oldest = min((s.oldest_version for s in samples if s.oldest_version != NO_VERSION), default=NO_VERSION)
    return oldest, max((s.newest_version for s in samples), default=NO_VERSION)


def keep_partial(state: State, group: Group, made: CheckedGroup) -> None:
    """Store what a worker made of a group it holds, in place of an older partial."""
    oldest, newest = version_range(made.samples)
    behind = state.steps_behind(newest) if newest != NO_VERSION else 0
    group.partial = Partial(len(made.frames), sum(made.table.num_tokens), oldest, newest, behind)
    state.save("partials", group.id, made.frames)
    state.tally(state.meta.counted, "partials kept")


def discard_unusable_partial(state: State, group: Group, *, is_wanted: bool) -> None:
    """Before a lease: let go of a partial that its taker cannot continue, or that would be too stale when it is trained."""
    oldest = group.partial.oldest_version
    if not is_wanted:
        state.waste_partial(group, "partial for a worker that continues none")
    elif (
        oldest != NO_VERSION
        and not state.rules.masks_offpolicy
        and state.version_of(admission.step_of_next(state)) - oldest > state.rules.max_staleness
    ):
        state.waste_partial(group, "partial grew too stale")


def partial_payloads(group: Group) -> list[StoredPayload]:
    """The bulk part of a lease reply that carries the partial of a group; empty when it has none."""
    return [StoredPayload(group.id, group.partial.num_frames, table="partials")] if group.partial.num_frames else []


def note_partial_used(state: State, group: Group) -> None:
    """Samples of the group were accepted: they hold what the partial had."""
    if group.partial.num_frames:
        state.tally(state.meta.counted, "partials continued")
        state.delete_partial(group)


def discard_abandoned_partials(state: State, step: int, version: int) -> None:
    """Let go of every partial with tokens of a version that the new timeline never had: newer, or of its number and trained further."""
    for group in state.groups.by_id.values():
        if group.partial.newest_version > version or group.partial.steps_behind > step:
            state.waste_partial(group, "partial of the abandoned timeline")
