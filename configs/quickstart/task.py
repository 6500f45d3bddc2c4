"""Written addition with a careless teacher: the problems, how they are split, and the teacher's work.

A problem is two numbers padded with zeros to one width of 2 to 4 digits. It is worked column by column from the right,
`digit+digit+carry=sum`, and the result follows the `>`:

    038+954   ->   8+4+0=12,3+5+1=09,0+9+0=09>992

The teacher forgets each carry with probability 0.65 and answers from that wrong work, so a model that only imitates him stays
wrong about as often as he is. The layout is what it can learn from him; the carrying it must find by itself, from rewards.
"""

import hashlib
import random
from collections.abc import Callable, Iterator

Problem = tuple[int, int]

WIDTHS = (2, 3, 4)
FORGET = 0.65
"""The probability that the teacher forgets a carry."""

SPLITS = {"heldout": range(0, 1), "sft": range(1, 3), "rl": range(3, 9), "layout": range(9, 10)}
"""Which of the ten buckets of problems each split draws from: no problem is in two splits."""


def bucket(problem: Problem) -> int:
    """0..9, the same for a+b and b+a, spread evenly by hash."""
    low, high = sorted(problem)
    return hashlib.sha256(f"{low}+{high}".encode()).digest()[0] * 10 // 256


def width(problem: Problem) -> int:
    """How many digits both numbers are written with."""
    return len(str(max(problem)))


def draw(rng: random.Random, split: str, digits: int | None = None) -> Problem:
    """One problem of the split, of that width or of any, each width being as likely as another."""
    digits = digits or rng.choice(WIDTHS)
    while True:
        problem = rng.randrange(10**digits), rng.randrange(10**digits)
        if width(problem) == digits and bucket(problem) in SPLITS[split]:
            return problem


def draw_distinct(rng: random.Random, split: str, n: int, wanted: Callable[[Problem], bool] = lambda _: True) -> list[Problem]:
    """`n` wanted problems of the split, as many of each width, none twice, a+b and b+a being one.

    Does not end when the split has too few: some 500 of two digits in one bucket, 150 of them without a carry.
    """
    chosen: dict[tuple[int, ...], Problem] = {}
    while len(chosen) < n:
        problem = draw(rng, split, WIDTHS[len(chosen) % len(WIDTHS)])
        if wanted(problem):
            chosen.setdefault(tuple(sorted(problem)), problem)
    return list(chosen.values())


def columns(problem: Problem) -> Iterator[tuple[int, int]]:
    """The pairs of digits, from the right."""
    a, b = problem
    for i in range(width(problem)):
        yield a // 10**i % 10, b // 10**i % 10


def has_carry(problem: Problem) -> bool:
    """Whether some column of the work passes a carry on."""
    return any(a + b >= 10 for a, b in columns(problem))


def question(problem: Problem) -> str:
    """`038+954`: what the user asks."""
    digits = width(problem)
    return f"{problem[0]:0{digits}d}+{problem[1]:0{digits}d}"


def answer(problem: Problem) -> str:
    """`992`: what must stand after the last `>`."""
    return str(sum(problem))


def work(problem: Problem, rng: random.Random | None = None, forget: float = FORGET) -> str:
    """The worked answer; with `rng` the careless teacher's, who forgets each carry with probability `forget`."""
    steps, result, carry = [], "", 0
    for a, b in columns(problem):
        if carry and rng is not None and rng.random() < forget:
            carry = 0
        total = a + b + carry
        steps.append(f"{a}+{b}+{carry}={total:02d}")
        carry, digit = divmod(total, 10)
        result = str(digit) + result
    return ",".join(steps) + ">" + ("1" if carry else "") + result
