"""An ordered source of prompts over the rows of files. The same position always gives the same prompt.

Without weights the files are one list, and an epoch is one pass over it: position p is place `p % n` of epoch `p // n`. With weights
each file is a stream that goes round in epochs of its own, and the streams take turns by weight. An epoch of the source then ends with the
window in which the file that lasts longest was gone through once, so that every prompt came at least once. A prompt's id is
`epoch/row`: the epoch of its stream, and its row over all files.
"""

import math
import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np

from broker.source.file_rows import FileRows
from broker.state.prompt_source import Prompt, PromptSource
from slimebus.bus.errors import DataError

KEPT_ORDERS = 2
"""Orders of each stream that are kept, 8 bytes a row; a million rows take 0.1 s to put in a new order."""


MAX_WINDOW = 10_000


class FileSource(PromptSource):
    """Prompts of files by position. `num_epochs`: None repeats for ever. Raises DataError when a file changed."""

    def __init__(self, rows: FileRows, *, shuffle: bool = True, seed: int = 0, num_epochs: int | None = None) -> None:
        self.rows, self.seed, self.is_shuffled = rows, seed, shuffle
        self.skipped = rows.skipped
        self._sizes = rows.sizes if rows.weights else [len(rows)]
        self._starts = [0, *accumulate(self._sizes)]
        self._mixture = Mixture(rows.weights or [Fraction(1)])
        self.epoch_size = self._mixture.window * self._mixture.windows_for(self._sizes)
        self._end = None if num_epochs is None else num_epochs * self.epoch_size
        order = f"shuffled by seed {seed}" if shuffle else "in order"
        turns = f", in turns {':'.join(map(str, self._mixture.shares))}" if rows.weights else ""
        self.fingerprint = f"{rows.fingerprint}, {order}{turns}"
        self._order = lru_cache(KEPT_ORDERS * len(self._sizes))(self._new_order)

    def take(self, position: int) -> Prompt | None:
        """The prompt at a position, or None past the last epoch."""
        if self._end is not None and position >= self._end:
            return None
        stream, count = self._mixture.turn(position)
        epoch, place = divmod(count, self._sizes[stream])
        row = self._starts[stream] + (int(self._order(stream, epoch)[place]) if self.is_shuffled else place)
        return Prompt(id=f"{epoch}/{row}", position=position, record=self.rows.record(row))

    def find(self, prompt_id: str) -> Prompt | None:
        """The prompt of an id, or None for an id that this source never gives."""
        found = re.fullmatch(r"(\d{1,12})/(\d{1,12})", prompt_id)
        if found is None or int(found[2]) >= len(self.rows):
            return None
        epoch, row = int(found[1]), int(found[2])
        stream = next(s for s, end in enumerate(self._starts[1:]) if row < end)
        place = row - self._starts[stream]
        place = int(np.flatnonzero(self._order(stream, epoch) == place)[0]) if self.is_shuffled else place
        position = self._mixture.position_of(stream, epoch * self._sizes[stream] + place)
        if self._end is not None and position >= self._end:
            return None
        return Prompt(id=prompt_id, position=position, record=self.rows.record(row))

    def report(self) -> dict[str, Any]:
        """Size of the data and of an epoch, and how many malformed rows were left out, for the status."""
        return {"prompts": len(self.rows), "epoch_size": self.epoch_size, "skipped": self.rows.num_skipped}

    def _new_order(self, stream: int, epoch: int) -> np.ndarray:
        """Rows of a stream, [its size], in the order of an epoch; RandomState gives the same numbers in every release of NumPy."""
        seed = np.random.SeedSequence([self.seed, stream, epoch])
        return np.random.RandomState(np.random.MT19937(seed)).permutation(self._sizes[stream])


class Mixture:
    """The turns of streams with these weights. A window is the shortest run of turns that has whole shares.

    Turns are spread evenly (the stream that is furthest behind its share goes next), so any stretch differs from its shares by less than
    one turn of each stream.
    """

    def __init__(self, weights: Sequence[Fraction]) -> None:
        self.shares = _shares(weights)
        self.window = sum(self.shares)
        self._slots: list[list[int]] = [[] for _ in weights]
        self._turns: list[tuple[int, int]] = []
        credit = [0] * len(weights)
        for turn in range(self.window):
            credit = [had + share for had, share in zip(credit, self.shares, strict=True)]
            stream = max(range(len(credit)), key=credit.__getitem__)
            credit[stream] -= self.window
            self._turns.append((stream, len(self._slots[stream])))
            self._slots[stream].append(turn)

    def turn(self, position: int) -> tuple[int, int]:
        """(stream, how many turns it had before) at a position."""
        window, place = divmod(position, self.window)
        stream, rank = self._turns[place]
        return stream, window * self.shares[stream] + rank

    def position_of(self, stream: int, count: int) -> int:
        """The position at which a stream has its turn number `count`, from 0."""
        window, rank = divmod(count, self.shares[stream])
        return window * self.window + self._slots[stream][rank]

    def windows_for(self, sizes: Sequence[int]) -> int:
        """Windows until every stream of these sizes was gone through once."""
        return max(-(-size // share) for size, share in zip(sizes, self.shares, strict=True))


def _shares(weights: Sequence[Fraction]) -> list[int]:
    scale = math.lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * scale) for weight in weights]
    shares = [share // math.gcd(*whole) for share in whole]
    if sum(shares) > MAX_WINDOW:
        given = ", ".join(f"{float(w):g}" for w in weights)
        what = f"prompt_data: weights {given} only come out even over {sum(shares)} prompts"
        raise DataError(f"{what}; at most {MAX_WINDOW}: use rounder weights")
    return shares
