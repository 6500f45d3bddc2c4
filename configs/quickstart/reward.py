"""The only thing that RL sees of the task: is the result right, and did the sample end by itself."""

from typing import Any


def reward(completion: Any) -> float:
    """1.0 if the model stopped and what it wrote after its last `>` is exactly the label, else 0.0. The work is not judged."""
    if completion.finish_reason != "stop":
        return 0.0
    _, mark, result = completion.text.rpartition(">")
    return 1.0 if mark and result == completion.label else 0.0
