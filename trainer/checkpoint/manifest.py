"""state.json: how far a checkpoint is, who wrote it, and every file of it with its hash and the parts in it."""

from pathlib import Path

import msgspec

from slimebus.bus.errors import DataError
from slimebus.weights.tensors import hash_bytes
from trainer.checkpoint.boxes import Box, Shape

MANIFEST = "state.json"
FORMAT = 2
"""1 was Megatron's torch_dist."""


class Progress(msgspec.Struct):
    """The step that is trained next and its version, the steps of the learning-rate schedule, and the lineage that saved it.

    position: of a critic, up to which it has learned from the groups of the bus.
    """

    step: int
    version: int
    num_updates: int
    lineage: str = ""
    position: int = 0


class Part(msgspec.Struct, array_like=True, frozen=True):
    """A box of the tensor `key`, at byte `at` of its file."""

    key: str
    offset: Shape
    shape: Shape
    dtype: str
    at: int

    @property
    def box(self) -> Box:
        """Where it lies in the whole tensor."""
        return self.offset, self.shape


class RankFile(msgspec.Struct):
    """What one rank wrote; host: where, as without a shared disk no other node has it."""

    name: str
    host: str
    num_bytes: int
    blake3: str
    parts: list[Part]


class Manifest(msgspec.Struct, forbid_unknown_fields=True):
    """All of a checkpoint. shapes: of the whole tensors. layout: sizes of the parallel dimensions of the ranks that wrote it."""

    format: int
    progress: Progress
    adam_step: int
    layout: dict[str, int]
    shapes: dict[str, Shape]
    files: list[RankFile]
    blake3: str = ""
    """Of this manifest with an empty one here."""

    def encode(self) -> bytes:
        """What state.json holds."""
        self.blake3 = ""
        self.blake3 = hash_bytes(msgspec.json.encode(self))
        return msgspec.json.encode(self)


def decode_manifest(payload: bytes) -> Manifest:
    """The inverse of Manifest.encode. Raises DataError when it is not what was written."""
    try:
        found = msgspec.json.decode(payload, type=Manifest)
    except (msgspec.DecodeError, RecursionError):
        found = None
    if found is None or found.encode() != payload:
        raise DataError(f"{MANIFEST} is not what was written")
    return found


def read_manifest(checkpoint: Path) -> bytes:
    """The bytes of a checkpoint's state.json, checked. Raises DataError when they are missing or not what was written."""
    try:
        payload = (checkpoint / MANIFEST).read_bytes()
    except OSError as bad:
        raise DataError(f"{MANIFEST}: {bad.strerror}") from None
    decode_manifest(payload)
    return payload
