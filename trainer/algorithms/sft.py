"""Supervised fine-tuning: the negative log-probability of the trained tokens."""

import numpy as np

from trainer.batches.batch import Batch
from trainer.objective.plugin import Algorithm, TokenLoss
from trainer.objective.row import Row


class Sft(Algorithm):
    """-log p per token; no advantages, rewards or logprobs of a sampler are read."""

    def advantages(self, batch: Batch) -> np.ndarray:
        return np.zeros(batch.num_tokens, np.float32)

    def loss(self, row: Row) -> TokenLoss:
        return TokenLoss(-row.new_logprobs)
