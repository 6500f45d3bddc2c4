"""Several streams dealt in turns by weight: the shares of a window are exact, and any place can be asked for."""

import math
from collections.abc import Sequence
from fractions import Fraction

from slimebus.bus.errors import DataError

MAX_WINDOW = 10_000


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
