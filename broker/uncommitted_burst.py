"""What the store could not take: kept as it is and tried again, while nobody is told anything that rests on it."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from broker.state.effects import Effect
from broker.store import StoreError, Write

RETRY_S = 1.0
"""Between two attempts to write what the store could not take."""
SAY_AGAIN_S = 60.0
"""How often the log repeats that the store still cannot be written."""


class UncommittedBurst(msgspec.Struct, kw_only=True):
    """One burst that is decided and not written. `since`, `retry_at`, `said_at`: seconds of the broker's clock."""

    writes: Mapping[tuple[str, str], Write]
    effects: Sequence[Effect]
    problem: StoreError
    since: float
    retry_at: float
    said_at: float

    def report(self, now: float) -> dict[str, Any]:
        """For the status."""
        return {"problem": self.problem.text, "unwritten_s": round(now - self.since, 3)}

    def with_more(self, writes: Mapping[tuple[str, str], Write], effects: Sequence[Effect]) -> "UncommittedBurst":
        """This, and what was decided after it."""
        return msgspec.structs.replace(self, writes={**self.writes, **writes}, effects=[*self.effects, *effects])
