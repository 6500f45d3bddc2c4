"""A plug-in that chooses the groups of a batch: what it sees, what it is asked for, and what counts as an answer."""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from broker.source.hook import call_plugin
from broker.state.groups import Group
from broker.state.records import BatchWanted, BufferFilter
from slimebus.bus.errors import HookError
from slimebus.bus.messages import MAX_BATCH_SIZE, NO_VERSION
from slimebus.hooks import hooks


class ReadyGroup(msgspec.Struct, frozen=True, kw_only=True):
    """What a buffer filter sees of a ready group.

    admitted: a number that rises with each lease (first in, first out). Sizes without failed samples. oldest_version: -1 when no policy
    made it. staleness: versions, in the step it is offered for. rewards: mean and standard deviation over its samples.
    """

    id: str
    admitted: int
    attempt: int
    num_samples: int
    num_tokens: int
    oldest_version: int
    staleness: int
    reward_mean: float
    reward_std: float


Plugin = Callable[[Sequence[ReadyGroup], BatchWanted], Sequence[str]]
"""Names the groups of a batch, in order, of those that are ready."""


def load_plugin(path: str, base: Path) -> Plugin:
    """The plug-in at `path`. Raises HookError when it cannot be loaded or does not take (groups, batch)."""
    return hooks.load(path, base=base, arguments=("groups", "batch"))


def buffer_filter(plugin: Plugin, path: str = "") -> BufferFilter:
    """What the state machine asks: it raises HookError for a plug-in that fails, or gives another batch than the one wanted."""

    def choose(groups: Sequence[Group], wanted: BatchWanted) -> list[Group]:
        offered = [describe(group, wanted.version) for group in groups]
        return checked(call_plugin(f"buffer filter {path}", lambda: _as_list(plugin(offered, wanted))), groups, wanted)

    return choose


def _as_list(answer: object) -> object:
    """A list of the plug-in's own class may fail in any way when it is read."""
    return [*answer] if isinstance(answer, list | tuple) else answer


def describe(group: Group, version: int) -> ReadyGroup:
    """A ready group as a filter sees it, offered for a step that trains `version`."""
    same = {name: getattr(group, name) for name in ReadyGroup.__struct_fields__ if name not in ("admitted", "attempt", "staleness")}
    staleness = 0 if group.oldest_version == NO_VERSION else version - group.oldest_version
    return ReadyGroup(**same, admitted=group.lease.id, attempt=group.lease.id, staleness=staleness)


def checked(answer: object, ready: Sequence[Group], wanted: BatchWanted) -> list[Group]:
    """The groups named, in the order named. Raises HookError for an answer that is not the batch wanted."""
    if not isinstance(answer, list | tuple) or not all(isinstance(name, str) for name in answer):
        raise HookError(f"buffer filter: gave {type(answer).__name__}; expected a list of group ids")
    offered = {group.id: group for group in ready}
    if strange := next((name for name in answer if name not in offered), None):
        raise HookError(f"buffer filter: {strange[:64]!r} is not one of the {len(offered)} groups offered")
    if len(set(answer)) < len(answer):
        raise HookError("buffer filter: a group is named twice")
    if len(answer) != (wanted.num_groups or min(max(1, len(answer)), MAX_BATCH_SIZE)):
        raise HookError(f"buffer filter: {len(answer)} groups for a batch of {wanted.num_groups or f'1 to {MAX_BATCH_SIZE}'}")
    tokens = sum(offered[name].num_tokens for name in answer)
    if wanted.num_tokens and tokens > wanted.num_tokens and len(answer) > 1:
        raise HookError(f"buffer filter: {len(answer)} groups of {tokens} tokens; at most {wanted.num_tokens} fit a batch")
    return [offered[name] for name in answer]
