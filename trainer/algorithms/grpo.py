"""GRPO: a reward against its group. Shao et al., "DeepSeekMath" (2024), section 4.1.2."""

import numpy as np

STD_FLOOR = 1e-4  # keeps a group of almost equal rewards finite


def grpo_advantages(rewards: np.ndarray, *, std_normalization: bool = True) -> np.ndarray:
    """(r - mean) / (population std + 1e-4) over one group of any size, [n] f32; equal rewards give exactly 0.

    Without std_normalization only the mean is subtracted.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if values.size == 0 or np.all(values == values[0]):  # the mean of equal floats need not equal them
        return np.zeros(values.shape, dtype=np.float32)
    centred = values - values.mean()
    return (centred / (values.std() + STD_FLOOR) if std_normalization else centred).astype(np.float32)
