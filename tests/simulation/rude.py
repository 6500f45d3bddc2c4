"""What a client in another language may get wrong: puts that lie about themselves, and names that no store takes as a key."""

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from simulation.actor import Actor, Request, require
from simulation.scenario import WIDE

from slimebus.bus import messages as m

if TYPE_CHECKING:
    from simulation.world import World

Frames = list[bytes]
Table = dict[str, Any]
LONG = 100_000


def _columns(name: str, change: Callable[[Any], Any]) -> Callable[[Table], None]:
    def apply(table: Table) -> None:
        table[name] = change(table.get(name, []))

    return apply


def _field(index: int, **changes: Any) -> Callable[[Table], None]:
    return lambda table: table["fields"][index].update(changes)


TABLES: dict[str, Callable[[Table], None]] = {
    "a sample more": _columns("num_tokens", lambda column: [*column, 1]),
    "a sample fewer": _columns("num_tokens", lambda column: column[:-1]),
    "a negative length": _columns("num_tokens", lambda column: [-n for n in column]),
    "lengths of text": _columns("num_tokens", lambda column: [str(n) for n in column]),
    "no versions": _columns("versions", lambda _: []),
    "version runs that are too short": _columns("versions", lambda column: [runs[:-1] for runs in column]),
    "versions of the future": _columns(
        "versions", lambda column: [[[v + LONG if v >= 0 else LONG, n] for v, n in runs] for runs in column]
    ),
    "a status that nobody knows": lambda table: table.update(status=["great"] * len(table["num_tokens"])),
    "a reward that is no number": lambda table: table.update(reward=[float("nan")] * len(table["num_tokens"])),
    "a reward without bound": lambda table: table.update(reward=[1e300] * len(table["num_tokens"])),
    "rewards of fewer samples": _columns("reward", lambda column: column[1:] or [1.0, 1.0, 1.0]),
    "a session of numbers": lambda table: table.update(session=[7] * len(table["num_tokens"])),
    "a session without end": lambda table: table.update(session=["x" * LONG] * len(table["num_tokens"])),
    "a negative turn": lambda table: table.update(turn=[-1] * len(table["num_tokens"])),
    "metadata of lists": lambda table: table.update(metadata=[{"key": [1]}] * len(table["num_tokens"])),
    "a temperature of 0": lambda table: table.update(temperature=[0.0] * len(table["num_tokens"])),
    "attempts that were not leased": lambda table: table.update(trajectory=[7] * len(table["num_tokens"])),
    "a field twice": lambda table: table["fields"].append(table["fields"][0]),
    "no fields": _columns("fields", lambda _: []),
    "no logprobs": lambda table: table["fields"].pop(2),
    "tokens of 8 bytes": _field(0, dtype="int64"),
    "a dtype that cannot cross": _field(3, dtype="complex64"),
    "a shape too many": lambda table: table["fields"][3]["shapes"].append([0]),
    "a negative shape": _field(3, shapes=[[-1]]),
    "no name": _field(3, name=""),
    "a name without end": _field(3, name="x" * LONG),
}
"""What may be wrong with the table of a put."""


def _with_table(change: Callable[[Table], None]) -> Callable[[Frames], Frames]:
    def apply(frames: Frames) -> Frames:
        table = msgspec.msgpack.decode(frames[0])
        change(table)
        return [msgspec.msgpack.encode(table), *frames[1:]]

    return apply


FRAMES: dict[str, Callable[[Frames], Frames]] = {
    "no frames": lambda frames: [],
    "the table alone": lambda frames: frames[:1],
    "a frame more": lambda frames: [*frames, b"x"],
    "a frame that is a byte short": lambda frames: [frames[0], frames[1][:-1], *frames[2:]],
    "frames in another order": lambda frames: [frames[0], *frames[:0:-1]],
    "a table of noise": lambda frames: [b"\xc1" * 40, *frames[1:]],
    "a table cut short": lambda frames: [frames[0][:-1], *frames[1:]],
    "a mask of more than 0 and 1": lambda frames: [*frames[:2], b"\x02" * len(frames[2]), *frames[3:]],
} | {name: _with_table(change) for name, change in TABLES.items()}
"""What may be wrong with the frames of a put."""

HEADERS: dict[str, Callable[[m.Put], m.Put]] = {
    "another lease": lambda put: msgspec.structs.replace(put, lease=put.lease + LONG),
    "another lineage": lambda put: msgspec.structs.replace(put, lineage="nobody's"),
    "a group that nobody leased": lambda put: msgspec.structs.replace(put, group=WIDE * 2000),
    "no group": lambda put: msgspec.structs.replace(put, group=""),
}
"""What may be wrong with the header of a put. Without a lineage in the lease, any lineage will do."""


def spoiled(rng: random.Random, put: m.Put, frames: Sequence[bytes], *, has_lineage: bool) -> tuple[str, m.Put, Frames]:
    """What is wrong with it, and the put."""
    names = [*FRAMES, *(name for name in HEADERS if has_lineage or name != "another lineage")]
    name = rng.choice(names)
    return (name, put, FRAMES[name](list(frames))) if name in FRAMES else (name, HEADERS[name](put), list(frames))


class WideName(Actor):
    """A worker whose name has as many characters as a name may have, each of four bytes."""

    role = "rollout"

    def __init__(self, world: "World") -> None:
        super().__init__(world, WIDE * 128)

    def begin(self, welcome: m.Welcome) -> None:
        self.leave()

    def refused(self, error: m.Error, request: Request) -> None:
        require(error.code in ("protocol", "not_joined", "fenced"), f"a wide name was refused as {error.code}: {error.text}")
        self.die()
