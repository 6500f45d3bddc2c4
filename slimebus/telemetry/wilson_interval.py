"""The uncertainty of an accuracy."""

import math

Z_95 = 1.959964
"""Standard normal quantile of a two-sided 95% interval."""


def wilson(accuracy: float, n: int, z: float = Z_95) -> tuple[float, float]:
    """The Wilson score interval of `accuracy` measured on `n` problems, within 0..1; (0, 1) when n is 0.

    Wilson 1927, eq. in https://doi.org/10.1080/01621459.1927.10502953: unlike the normal interval it keeps its promise near 0 and 1.
    """
    if n <= 0:
        return 0.0, 1.0
    scale = 1 + z * z / n
    middle = (accuracy + z * z / (2 * n)) / scale
    half = z / scale * math.sqrt(accuracy * (1 - accuracy) / n + z * z / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)
