"""A plug-in that chooses the groups of a batch: what it sees, what it is asked for, and what counts as an answer."""

import math
from collections.abc import Callable, Sequence

import msgspec

from broker.state.groups import Group
from broker.state.rules import MAX_BATCH_SIZE
from slimebus.errors import HookError
from slimebus.messages import NO_VERSION


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


class BatchWanted(msgspec.Struct, frozen=True, kw_only=True):
    """What a buffer filter is asked for: exactly `num_groups` groups, or groups of at most `num_tokens` tokens (0: no such bound)."""

    step: int
    version: int
    num_groups: int
    num_tokens: int


BufferFilter = Callable[[Sequence[ReadyGroup], BatchWanted], Sequence[str]]
"""Chooses the groups of a batch, by id and in order, from those that are ready. Raises HookError."""


def describe(group: Group, version: int) -> ReadyGroup:
    """A ready group as a filter sees it, offered for a step that trains `version`."""
    return ReadyGroup(
        id=group.id,
        admitted=group.admitted,
        attempt=group.attempt,
        num_samples=group.num_samples,
        num_tokens=group.num_tokens,
        oldest_version=group.oldest_version,
        staleness=0 if group.oldest_version == NO_VERSION else version - group.oldest_version,
        reward_mean=group.reward_mean,
        reward_std=group.reward_std,
    )


def checked(answer: object, ready: Sequence[Group], wanted: BatchWanted) -> list[Group]:
    """The groups named, in the order named. Raises HookError for an answer that is not the batch wanted."""
    if not isinstance(answer, list | tuple) or not all(isinstance(name, str) for name in answer):
        raise HookError(f"buffer filter: gave {type(answer).__name__}; expected a list of group ids")
    offered = {group.id: group for group in ready}
    if strange := next((name for name in answer if name not in offered), None):
        raise HookError(f"buffer filter: {strange[:64]!r} is not one of the {len(offered)} groups offered")
    if len(set(answer)) < len(answer):
        raise HookError("buffer filter: a group is named twice")
    if wanted.num_groups and len(answer) != wanted.num_groups:
        raise HookError(f"buffer filter: {len(answer)} groups for a batch of {wanted.num_groups}")
    if not 0 < len(answer) <= MAX_BATCH_SIZE:
        raise HookError(f"buffer filter: {len(answer)} groups; expected 1 to {MAX_BATCH_SIZE}")
    tokens = sum(offered[name].num_tokens for name in answer)
    if wanted.num_tokens and tokens > wanted.num_tokens and len(answer) > 1:
        raise HookError(f"buffer filter: {len(answer)} groups of {tokens} tokens; at most {wanted.num_tokens} fit a batch")
    return [offered[name] for name in answer]


def spread(rewards: Sequence[float]) -> tuple[float, float]:
    """Mean and (population) standard deviation; (0, 0) of nothing, and exactly 0 for equal rewards."""
    if not rewards:
        return 0.0, 0.0
    mean = math.fsum(rewards) / len(rewards)
    if min(rewards) == max(rewards):
        return mean, 0.0
    return mean, math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards))
