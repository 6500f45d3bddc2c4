"""From a batch to micro-batches of packed rows, the same number on every data-parallel rank.

A row holds whole samples without their last token (nothing is predicted from it): position i reads tokens[i] and predicts tokens[i + 1].
The samples of a row are sorted by length, so that neighbours are about equally long (packed_layout.py: runs).

    sample  p0 p1 c0 c1 c2        row      p0 p1 c0 c1   (padded to the multiple that context and sequence parallelism need)
                                  target   p1 c0 c1 c2
                                  source    1  2  3  4   index of the target in the batch's token columns

With context parallelism a rank holds a zigzag part of each sequence. A rank with nothing to do gets a row of padding, mask 0.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trainer.batches.batch import Batch
from trainer.batches.on_device import on_device
from trainer.batches.packed_layout import packed_parameters, zigzag_positions

EVENNESS = 0.01
"""Of the tokens of a row: how much rows may differ by before a lower limit is looked for."""


@dataclass(frozen=True, slots=True)
class RankLayout:
    """This rank's place in the layout, and what the layout asks of a row."""

    dp_size: int = 1
    """Data-parallel ranks, each with its own rows."""
    dp_rank: int = 0
    """This rank's place among them."""
    cp_size: int = 1
    """Context-parallel ranks; each sequence is padded to a multiple of 2 * cp_size when there is more than one."""
    cp_rank: int = 0
    """This rank's place among them."""
    sp_size: int = 1
    """Tensor-parallel ranks with sequence parallelism, else 1; each rank's row is padded to a multiple of it."""
    device: torch.device | None = None
    """Where the rows go."""
    attention_tokens: float = math.inf
    """The length of a sequence with attention that costs as much as all else that is computed of it."""

    @property
    def sequence_multiple(self) -> int:
        """Every sequence's length is a multiple of this."""
        return 2 * self.cp_size if self.cp_size > 1 else 1

    @property
    def row_multiple(self) -> int:
        """A whole row's length is a multiple of this."""
        return math.lcm(self.sequence_multiple, self.cp_size * self.sp_size)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One packed row, this rank's part of it: t tokens."""

    tokens: torch.Tensor
    """[1, t] int64, input ids."""
    targets: torch.Tensor
    """[1, t] int64, the token that each position predicts."""
    positions: torch.Tensor
    """[1, t] int64, position within the sample."""
    loss_mask: torch.Tensor
    """[1, t] f32, of the target."""
    source: torch.Tensor
    """[1, t] int64, index of the target in the batch's token columns; 0 at padding."""
    sample: torch.Tensor
    """[1, t] int64, index of the target's sample in the batch."""
    sequence: torch.Tensor
    """[1, t] int64, which of the row's sequences the position belongs to, padding to the sequence before it."""
    num_sequences: int
    """Of the row, the same on every context-parallel rank."""
    is_real: torch.Tensor
    """[1, t] bool, false at padding."""
    temperature: torch.Tensor | None
    """[1, t] f32, what the logits of each position are divided by; None where all are 1."""
    packed: Any
    """PackedSeqParams with the layout on it."""


def best_fit(lengths: np.ndarray, max_tokens: int) -> list[list[int]]:
    """Rows of at most max_tokens, or of one sample: each sample (index), from the longest on, goes into the fullest row that has room."""
    rows, rooms = list[list[int]](), list[tuple[int, int]]()  # rooms: of each row what is left and its index, rising
    for sample, length in sorted(enumerate(lengths.tolist()), key=lambda pair: -pair[1]):
        at = bisect_left(rooms, (length, -1))
        if at < len(rooms):
            room, row = rooms.pop(at)
        else:
            room, row = max_tokens, len(rows)
            rows.append([])
        rows[row].append(sample)
        insort(rooms, (max(0, room - length), row))
    return rows


def plan_rows(lengths: np.ndarray, dp_size: int, max_tokens: int, attention_tokens: float = math.inf) -> list[list[np.ndarray]]:
    """For each data-parallel rank its rows, each the indices of its samples; every rank has the same number of rows, at least one.

    `lengths` are row lengths (padded, without the last token). A row has at most max_tokens, or one sample. There are as few rows as best
    fit finds, rounded up to the ranks; then the lowest limit is taken that gives no more (Coffman et al., MULTIFIT, 1978), so rows are full
    and even. Ranks get rows of about equal cost at the same time, in turn the dearest and the cheapest of these: where experts are spread
    they wait for each other at each row, and else at the end.
    """
    rows = best_fit(lengths, max_tokens)
    num_steps = max(1, math.ceil(len(rows) / dp_size))
    low, high = math.ceil(int(lengths.sum()) / (num_steps * dp_size)), max_tokens
    while high - low > EVENNESS * high:
        middle = (low + high) // 2
        if len(tried := best_fit(lengths, middle)) <= num_steps * dp_size:
            rows, high = tried, middle
        else:
            low = middle + 1
    made = [np.array(sorted(row, key=lambda sample: int(lengths[sample])), np.int64) for row in rows]
    made += [np.zeros(0, np.int64)] * (num_steps * dp_size - len(made))
    made.sort(key=lambda row: -float((lengths[row] * (1 + lengths[row] / attention_tokens)).sum()))
    steps = [made[i : i + dp_size] for i in range(0, len(made), dp_size)]
    return [[step[rank if i % 2 == 0 else dp_size - 1 - rank] for i, step in enumerate(steps)] for rank in range(dp_size)]


def row_lengths(lengths: np.ndarray, layout: RankLayout) -> np.ndarray:
    """Tokens that samples of these lengths take in a row: one less, rounded up."""
    multiple = layout.sequence_multiple
    return np.maximum(1, -(-(lengths - 1) // multiple)) * multiple


def pack_row(batch: Batch, samples: np.ndarray, layout: RankLayout) -> MicroBatch:
    """The packed row of these samples (indices), this context-parallel rank's part of it."""
    lengths = batch.lengths[samples]
    if len(samples) == 0:  # a row of padding: sample 0 without a token that predicts another
        samples, lengths = np.array([0]), np.array([1])
    padded = row_lengths(lengths, layout)
    padded[-1] += -int(padded.sum()) % layout.row_multiple
    offset = np.arange(int(padded.sum())) - np.repeat(np.cumsum(padded) - padded, padded)
    is_real = offset < np.repeat(lengths - 1, padded)
    source = np.where(is_real, np.repeat(batch.starts[samples], padded) + offset, 0)
    held = zigzag_positions(padded.tolist(), layout.cp_size, layout.cp_rank)
    sequence = np.repeat(np.arange(len(samples)), padded)[held]
    source, is_real, offset = source[held], is_real[held], offset[held]
    temperatures = batch["temperature"]
    target = np.where(is_real, source + 1, 0)

    def row(array: np.ndarray) -> torch.Tensor:
        return on_device(array[None], layout.device)

    return MicroBatch(
        tokens=row(batch["tokens"][source].astype(np.int64)),
        targets=row(batch["tokens"][target].astype(np.int64)),
        positions=row(offset),
        loss_mask=row(np.where(is_real, batch["loss_mask"][target], np.float32(0.0))),
        source=row(target),
        sample=row(samples[sequence]),
        sequence=row(sequence),
        num_sequences=len(samples),
        is_real=row(is_real),
        temperature=None if np.all(temperatures == 1) else row(temperatures[samples[sequence]]),
        packed=packed_parameters(padded.tolist(), cp_size=layout.cp_size, cp_rank=layout.cp_rank, device=layout.device),
    )


def pack(batch: Batch, samples: Sequence[int] | np.ndarray, max_tokens: int, layout: RankLayout) -> list[MicroBatch]:
    """This rank's micro-batches of the given samples of the batch (indices). Samples of one token are left out."""
    chosen = np.asarray(samples, dtype=np.int64)
    chosen = chosen[batch.lengths[chosen] > 1]
    lengths = row_lengths(batch.lengths[chosen], layout)
    rows = plan_rows(lengths, layout.dp_size, max_tokens * layout.cp_size, layout.attention_tokens)[layout.dp_rank]
    return [pack_row(batch, chosen[row], layout) for row in rows]
