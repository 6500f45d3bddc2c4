"""A teacher for on-policy distillation: the model that bin/quickstart trained scores every token that the student samples.

    slimebus up configs/quickstart/run.yaml --advantage-estimator on_policy_distillation --custom-generate-function-path teacher.py:generate

It stands in the worker, as this model is small; a large one is an engine of its own, with scores as late fields (docs/consumers.md).
"""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

TEACHER = Path(__file__).parents[2] / "runs" / "quickstart" / "rl" / "hf"


async def generate(session: Any) -> None:
    """One turn, with the field teacher_logprobs: [T] f32 over prompt and response, at temperature 1."""
    await session.generate()
    session.extras["teacher_logprobs"] = scores(session.token_ids)


def scores(tokens: np.ndarray) -> np.ndarray:
    """log p(tokens[t] | tokens[:t]) of the teacher, [T] f32; 0 at the first."""
    import torch

    ids = torch.from_numpy(tokens).long()
    with torch.no_grad():
        logprobs = teacher()(ids[None]).logits[0, :-1].float().log_softmax(-1)
    return torch.cat([torch.zeros(1), logprobs.gather(1, ids[1:, None])[:, 0]]).numpy()


@cache
def teacher() -> Any:
    """The model, loaded once."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(TEACHER)
