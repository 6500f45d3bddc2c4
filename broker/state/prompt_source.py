"""What the state machine asks of a source of prompts."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec


class Prompt(msgspec.Struct, frozen=True):
    """One prompt of the source: an id that never changes, its place in the order, its opaque record."""

    id: str
    position: int
    record: bytes


class PromptSource:
    """Prompts by position: the same position gives the same prompt, always. This one has none: the prompts of its run are all pushed."""

    fingerprint = "no prompt data"
    skipped: Sequence[str] = ()
    """Malformed prompts left out, the first ones with place and reason."""

    def take(self, position: int) -> Prompt | None:
        """The prompt at a position, or None when the source has ended."""
        return None

    def find(self, prompt_id: str) -> Prompt | None:
        """The prompt of an id, or None when this source never had it, or when it is found again in the store only."""
        return None

    def report(self) -> dict[str, Any]:
        """What to show in the status: names to numbers or text."""
        return {}


@runtime_checkable
class StatefulSource(Protocol):
    """A source that changes with what is drawn from it and with what became of that. Its prompts are found again in the store only."""

    def restore(self, state: bytes) -> None:
        """Take up the state that `saved` gave."""

    def saved(self) -> bytes | None:
        """The state to keep with what was drawn and reported, None when it is as it was. Raises nothing."""

    def feedback(self, result: "GroupResult") -> None:
        """What became of a group. Raises nothing."""


class GroupResult(msgspec.Struct, kw_only=True):
    """What became of an attempt at a prompt. outcome: trained | dropped | dead | requeued (its samples were thrown away).

    rewards: one for each sample, None for those that failed; empty when no samples came. step: that trained it. metadata: the prompt's.
    """

    id: str
    attempt: int
    outcome: str
    reason: str
    rewards: list[float | None] = []
    step: int = -1
    metadata: dict[str, Any] = {}
