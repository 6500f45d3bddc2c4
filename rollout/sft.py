"""Demonstrations as samples: supervised fine-tuning over the same bus, leases and trainer as everything else.

Use as `rollout.custom_generate_function_path: rollout.sft:demonstration` with `engine.engine: none`,
`algorithm.advantage_estimator: sft` and `n_samples_per_prompt: 1`.
"""

import numpy as np

from rollout.response import Response, Task
from rollout.tokenizer import Tokenizer
from slimebus.bus.messages import NO_VERSION


def demonstration(task: Task, tokenizer: Tokenizer) -> Response:
    """The label as if it had been sampled: its tokens and the end token, trained; no version, so never stale."""
    ids = tokenizer.encode(str(task.label))
    if tokenizer.eos_token_id is not None:
        ids = np.append(ids, np.int32(tokenizer.eos_token_id))
    return Response(
        task=task,
        token_ids=ids,
        logprobs=np.zeros(len(ids), np.float32),
        versions=[(NO_VERSION, len(ids))],
        text=str(task.label),
        reward=0.0,
    )
