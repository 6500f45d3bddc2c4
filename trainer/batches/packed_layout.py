"""Where the sequences of one packed row lie, for the attention and the rotary embedding.

    row       [ a0 a1 a2 | b0 b1 | c0 c1 c2 ]      lengths 3, 2, 3 (each padded to 2 * cp with context parallelism)
    padded    [ a0 a1 a2 ]   slots 0 1 2           n = 3 sequences, width 3
              [ b0 b1  . ]         3 4
              [ c0 c1 c2 ]         6 7 8

With context parallelism over cp ranks each sequence is cut in 2 * cp chunks and rank r holds chunks r and 2 * cp - 1 - r, so that
every rank has the same causal work (Megatron's zigzag).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from trainer.batches.on_device import on_device


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


class PackedLayout:
    """Index tensors of one packed row on one rank, made once and used by every layer."""

    def __init__(self, lengths: Sequence[int], *, cp_size: int = 1, cp_rank: int = 0, device: Any = None) -> None:
        whole = np.asarray(lengths, dtype=np.int64)
        local = whole // cp_size
        self.num_sequences, self.width, self.local_width = len(whole), int(whole.max()), int(local.max())
        self.key_slots = on_device(slots_of(whole, self.width), device)
        self.query_slots, self.gathered_order, self.mask = self.key_slots, None, None
        held = [zigzag_positions(lengths, cp_size, rank) for rank in range(cp_size)]
        positions = positions_of(whole)[held[cp_rank]]
        if cp_size > 1:
            slots = slots_of(local, self.local_width)
            self.gathered_order = on_device(np.concatenate(held).argsort(), device)
            self.query_slots = on_device(slots, device)
            self.mask = on_device(self.causal_mask(slots, positions), device)
        self.positions = on_device(positions, device)
        self._rotary: tuple[torch.Tensor, torch.Tensor] | None = None

    def causal_mask(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Which keys each local query may see; [n, 1, local_width, width] bool."""
        padded = np.zeros(self.num_sequences * self.local_width, np.int64)
        padded[slots] = positions
        return padded.reshape(self.num_sequences, 1, -1, 1) >= np.arange(self.width)

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
