"""A seeded order of any number of rows that takes no memory and can be asked both ways.

A generalised Feistel network permutes Z_a x Z_b, with a = ceil(sqrt(n)) and b = ceil(n / a); what falls outside of n is permuted again
(cycle walking: Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). Fewer than a of a * b cells are outside, so one
pass is nearly always enough. An array of the order would take 8 bytes a row, and as long as the rows to make, at every epoch.
"""

import math

import xxhash

ROUNDS = 8
"""Four make a network indistinguishable from random (Luby and Rackoff 1988); tiny domains mix better with more."""


class Shuffle:
    """A permutation of 0..size-1 that `key` decides."""

    def __init__(self, size: int, key: str) -> None:
        self.size = size
        self._a = max(1, math.isqrt(max(0, size - 1)) + 1)
        self._b = -(-size // self._a)
        self._seeds = [xxhash.xxh3_64_intdigest(f"{key}/{number}".encode()) for number in range(ROUNDS)]

    def row_at(self, place: int) -> int:
        """The row that comes at a place."""
        while True:
            place = self._forward(place)
            if place < self.size:
                return place

    def place_of(self, row: int) -> int:
        """The place at which a row comes."""
        while True:
            row = self._backward(row)
            if row < self.size:
                return row

    def _forward(self, cell: int) -> int:
        left, right = divmod(cell, self._b)
        for number, seed in enumerate(self._seeds):
            if number % 2:
                right = (right + _mix(left, seed)) % self._b
            else:
                left = (left + _mix(right, seed)) % self._a
        return left * self._b + right

    def _backward(self, cell: int) -> int:
        left, right = divmod(cell, self._b)
        for number in reversed(range(ROUNDS)):
            if number % 2:
                right = (right - _mix(left, self._seeds[number])) % self._b
            else:
                left = (left - _mix(right, self._seeds[number])) % self._a
        return left * self._b + right


def _mix(half: int, seed: int) -> int:
    return xxhash.xxh3_64_intdigest(half.to_bytes(8, "little"), seed)
