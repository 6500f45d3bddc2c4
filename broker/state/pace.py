"""What the broker remembers of a run's own pace; in memory only but for the times of the last steps (Meta.step_seconds)."""

import math
from collections import deque
from collections.abc import Iterable
from typing import Any

RECENT = 64


class Pace:
    """Times in seconds of the machine's clock, of the last steps and groups.

    intervals: between commits. group_seconds: from lease to put. last_progress_at: when the run last
    moved; progress_key: what it looked like then; num_tokens: what workers reported when it was last asked. trainer: the last that joined.
    assigned_at: when the next step's batch was chosen.
    """

    def __init__(self) -> None:
        self.intervals: deque[float] = deque(maxlen=RECENT)
        self.group_seconds: deque[float] = deque(maxlen=RECENT)
        self.last_progress_at = 0.0
        self.num_tokens = 0.0
        self.stalled_at: float | None = None
        self.progress_key: tuple[Any, ...] = ()
        self.next_step, self.lineage = 0, ""
        self.has_stepped = False
        self.num_joined = 0
        self.trainer = ""
        self.trainer_left_at: float | None = None
        self.assigned, self.assigned_at = -1, 0.0


def quantile(values: Iterable[float], share: float) -> float:
    """The least value that at least `share` of them do not exceed; 0 when there are none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0
