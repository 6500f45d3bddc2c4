"""Where the sequences of one packed row lie, for the attention and the rotary embedding.

    row       [ a0 a1 a2 | b0 b1 | c0 c1 c2 | d0 .. d99 ]      lengths 3, 2, 3, 100 (each padded to 2 * cp with context parallelism)
    run       [ a0 a1 a2 ]   slots 0 1 2                       n = 3 sequences of about one length, width 3
              [ b0 b1  . ]         3 4
              [ c0 c1 c2 ]         6 7 8
    run       [ d0 .. d99 ]  slots 0 .. 99                     n = 1, width 100

With context parallelism over cp ranks each sequence is cut in 2 * cp chunks and rank r holds chunks r and 2 * cp - 1 - r, so that
every rank has the same causal work (Megatron's zigzag).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from trainer.batches.on_device import on_device

RUN_COST = 128**2
"""What a run more costs, as attention of one head costs it: the square of a length (4 heads of 32 on a CPU: 0.5 ms)."""


def zigzag_positions(lengths: Sequence[int], cp_size: int, cp_rank: int) -> np.ndarray:
    """Positions in a row of sequences of these lengths (multiples of 2 * cp_size) that this rank holds, in the order it holds them."""
    row = np.arange(sum(lengths))
    if cp_size == 1:
        return row
    num_chunks = 2 * cp_size
    chunks = np.split(row, np.cumsum(np.repeat(np.asarray(lengths) // num_chunks, num_chunks))[:-1])
    return np.concatenate([chunk for i, chunk in enumerate(chunks) if i % num_chunks in (cp_rank, num_chunks - 1 - cp_rank)])


def slots_of(lengths: np.ndarray, width: int) -> np.ndarray:
    """Slot of each token of a row in the padded batch [n, width] flattened; [sum(lengths)] int64."""
    starts = np.repeat(np.arange(len(lengths)) * width, lengths)
    return starts + positions_of(lengths)


def positions_of(lengths: np.ndarray) -> np.ndarray:
    """Position of each token in its own sequence; [sum(lengths)] int64."""
    first = np.repeat(np.cumsum(lengths) - lengths, lengths)
    return np.arange(int(lengths.sum())) - first


def cut_runs(lengths: np.ndarray) -> list[np.ndarray]:
    """Neighbours that are attended to as one padded batch: a sequence begins a new one where padding would cost more than RUN_COST."""
    ends, count, width = list[int](), 0, 0
    for i, length in enumerate(lengths.tolist()):
        widest = max(width, length)
        if (count + 1) * widest**2 > count * width**2 + length**2 + RUN_COST:
            ends.append(i)
            count, widest = 0, length
        count, width = count + 1, widest
    return np.split(lengths, ends)


class Run:
    """Sequences of a row that are attended to as one padded batch. lengths: whole ones; positions: of this rank's tokens of them."""

    def __init__(self, lengths: np.ndarray, positions: np.ndarray, cp_size: int, device: Any) -> None:
        local = lengths // cp_size
        self.num_sequences, self.width, self.local_width = len(lengths), int(lengths.max()), int(local.max())
        slots = slots_of(local, self.local_width)
        self.query_slots, self.key_slots = on_device(slots, device), on_device(slots_of(lengths, self.width), device)
        padded = np.zeros(self.num_sequences * self.local_width, np.int64)
        padded[slots] = positions
        self._positions = on_device(padded.reshape(self.num_sequences, 1, -1, 1), device) if cp_size > 1 else None

    def causal_mask(self) -> torch.Tensor | None:
        """Which keys each local query may see, [n, 1, local_width, width] bool; None without context parallelism: attention is causal.

        It grows with the square of a length, so it is made for one call of attention; Transformer Engine's needs none.
        """
        return None if self._positions is None else self._positions >= torch.arange(self.width, device=self._positions.device)


class PackedLayout:
    """Index tensors of one packed row on one rank, made once and used by every layer."""

    def __init__(self, lengths: Sequence[int], *, cp_size: int = 1, cp_rank: int = 0, device: Any = None) -> None:
        whole = np.asarray(lengths, dtype=np.int64)
        held = [zigzag_positions(lengths, cp_size, rank) for rank in range(cp_size)]
        positions, runs = positions_of(whole)[held[cp_rank]], cut_runs(whole)
        self.sizes = [int(run.sum()) for run in runs]
        """Tokens of each run, on all context-parallel ranks."""
        self.local_sizes = [size // cp_size for size in self.sizes]
        parts = np.split(positions, np.cumsum(self.local_sizes)[:-1])
        self.runs = [Run(run, part, cp_size, device) for run, part in zip(runs, parts, strict=True)]
        self.gathered_order = on_device(np.concatenate(held).argsort(), device) if cp_size > 1 else None
        self.positions = on_device(positions, device)
        self._rotary: tuple[torch.Tensor, torch.Tensor] | None = None

    def rotary(self, angles: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of each local token's angles, [t, 1, d]; computed at the first call, the same for all layers."""
        if self._rotary is None or self._rotary[0].dtype != dtype:
            rows = angles.reshape(angles.shape[0], 1, -1)[self.positions]
            self._rotary = rows.cos().to(dtype), rows.sin().to(dtype)
        return self._rotary


def packed_parameters(lengths: Sequence[int], *, cp_size: int = 1, cp_rank: int = 0, device: Any = None) -> PackedSeqParams:
    """PackedSeqParams of a row of sequences of these (padded) lengths; the layout rides on its cu_seqlens tensors."""
    ends = on_device(np.cumsum([0, *lengths], dtype=np.int32), device)
    ends.packed_layout = PackedLayout(lengths, cp_size=cp_size, cp_rank=cp_rank, device=device)  # type: ignore[attr-defined]
    longest = max(lengths)
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest)
