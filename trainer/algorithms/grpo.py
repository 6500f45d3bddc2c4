"""GRPO: a reward against its group. Shao et al., "DeepSeekMath" (2024), section 4.1.2."""

import numpy as np

STD_FLOOR = 1e-4  # keeps a group of almost equal rewards finite


def grpo_advantages(rewards: np.ndarray, weights: np.ndarray | None = None, *, std_normalization: bool = True) -> np.ndarray:
    """(r - mean) / (population std + 1e-4) over one group of any size, [n] f32; equal rewards give exactly 0.

    weights: [n], what each counts in mean and std (all alike); with 1 / the number of its trajectory's samples each trajectory counts
    once. Without std_normalization only the mean is subtracted.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if values.size == 0 or np.all(values == values[0]):  # the mean of equal floats need not equal them
        return np.zeros(values.shape, dtype=np.float32)
    centred = values - np.average(values, weights=weights)
    std = np.sqrt(np.average(centred**2, weights=weights))
    return (centred / (std + STD_FLOOR) if std_normalization else centred).astype(np.float32)
