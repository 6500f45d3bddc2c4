"""How many cores the weights may have beside training and generation."""

import os

MOST = 8
"""More wait for memory, not for work."""


def num_threads(configured: int, *, shared_by: int = 1) -> int:
    """`weights.weights_threads`; where it is 0, half of the cores of this process, shared by so many processes: from 1 to 8."""
    if configured:
        return configured
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST, cores // 2 // shared_by))
