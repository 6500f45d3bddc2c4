"""How context parallelism shares a packed row: Megatron's zigzag."""

from collections.abc import Sequence

import torch


def zigzag_positions(lengths: Sequence[int], cp_size: int, cp_rank: int) -> torch.Tensor:
    """Positions in a row of sequences of these lengths (multiples of 2 * cp_size) that this rank holds, in the order it holds them."""
    held, start = [], 0
    for length in lengths:
        chunk = length // (2 * cp_size)
        for part in (cp_rank, 2 * cp_size - 1 - cp_rank):
            held.append(torch.arange(start + part * chunk, start + (part + 1) * chunk))
        start += length
    return torch.cat(held)
