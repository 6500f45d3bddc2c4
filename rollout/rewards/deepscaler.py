"""1 when what is boxed after the thinking equals the label; 0 for a response that does not end its thinking.

DeepScaleR's rule (https://github.com/agentica-project/rllm): the answer stands after `</think>`, or `###Response`. Equality is that of the
reward `math`.
"""

import re

from rollout.rewards.math import is_answer, last_boxed, missing
from rollout.samples.response import Response

__all__ = ["missing", "reward"]


def reward(response: Response) -> float:
    """1.0 or 0.0."""
    _, mark, after = response.text.rpartition("</think>")
    if not mark:
        _, mark, after = response.text.partition("###Response")
    answer, label = last_boxed(after) if mark else None, str(response.label)
    has_box = re.search(r"\\boxed", label) is not None
    wanted = last_boxed(label) if has_box else label
    return float(answer is not None and bool(wanted) and is_answer(answer, str(wanted)))
