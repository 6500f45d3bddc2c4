"""The samples that `bin/bench trainer` trains on: the same in every step and every process."""

import numpy as np

from slimebus.bus.messages import NO_VERSION
from slimebus.bus.samples import Sample

GROUPS, SAMPLES = 4, 8
"""Groups of a step, samples of a group."""
SHORTEST, LONGEST = 16, 512
VOCABULARY = 2048
BUDGET = 2048
"""trainer.max_tokens_per_gpu."""
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.02,
}  # fmt: skip


def made_group(index: int) -> list[Sample]:
    """Group `index` of a step: lengths drawn evenly from SHORTEST to LONGEST, one token of prompt, rewards 0 and 1 by turns."""
    draw = np.random.default_rng(index)
    lengths = draw.integers(SHORTEST, LONGEST + 1, SAMPLES)
    return [
        Sample(
            tokens=draw.integers(0, VOCABULARY, length).astype(np.int32),
            loss_mask=(np.arange(length) > 0).astype(np.uint8),
            rollout_logprobs=np.full(length, -np.log(VOCABULARY), np.float32),
            versions=[(NO_VERSION, int(length))],
            reward=float(place % 2),
        )
        for place, length in enumerate(lengths)
    ]


def step_tokens() -> int:
    """Tokens of all samples of a step."""
    return sum(len(sample.tokens) for index in range(GROUPS) for sample in made_group(index))
