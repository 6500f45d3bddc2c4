"""From a loss per token to one number: what each token weighs, once for a whole optimizer step.

S samples   N tokens of all samples
"""

from typing import Literal, get_args

import numpy as np
import torch

from trainer.batches.batch import Batch

Aggregation = Literal["token", "sequence", "group", "constant"]
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)


def token_weights(part: Batch, aggregation: str, constant_length: int) -> np.ndarray:
    """What each token's loss weighs in the loss of an optimizer step, [N] f32; 0 where the mask is 0. The samples of a trajectory are one.

        token      mean over all trained tokens (DAPO)
        sequence   mean over trajectories of each one's mean over tokens (GRPO's paper)
        group      mean over groups of each one's mean over tokens
        constant   sum / (trajectories * constant_length): Liu et al., "Understanding R1-Zero-Like Training" (Dr. GRPO, 2025), section 3.2

    A trajectory or group without a trained token is not counted. As it is computed on the whole step, it depends on no row, rank or layout.
    """
    trained = part.sample_sums(np.ones(part.num_tokens))
    trajectories = part.trajectories
    of_trajectory, of_group = np.bincount(trajectories, weights=trained), np.bincount(part.group_of, weights=trained)
    num_trajectories, num_groups = max(1, int((of_trajectory > 0).sum())), max(1, int((of_group > 0).sum()))
    if aggregation == "token":
        per_sample = np.full(part.num_samples, 1 / max(1.0, trained.sum()))
    elif aggregation == "sequence":
        per_sample = 1 / (num_trajectories * np.maximum(1, of_trajectory[trajectories]))
    elif aggregation == "group":
        per_sample = 1 / (num_groups * np.maximum(1, of_group[part.group_of]))
    else:
        per_sample = np.full(part.num_samples, 1 / (num_trajectories * constant_length))
    return (part.to_tokens(per_sample) * (part["loss_mask"] > 0)).astype(np.float32)


def masked_sum(values: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """Sum over the tokens with mask 1. A masked token counts nothing even where its value is not finite."""
    return torch.where(loss_mask > 0, values, 0.0).sum()
