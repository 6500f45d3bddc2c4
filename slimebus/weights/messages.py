"""What a puller and a weight server say to each other. docs/weights.md describes each field and the sequence.

puller                               server
manifest_request (have)        ->
                               <-    manifest_reply + [manifest]
chunk_request (pieces)         ->    at most `credits` of them unanswered
                               <-    chunk_reply + [piece, piece, ...]
    a piece is gone                ->    ask for the manifest again
"""

import msgspec

from slimebus.errors import WeightsError
from slimebus.messages import Error, Message, Ok, wire_name
from slimebus.weights.tensors import NO_BASE

MAX_CHUNK_BYTES = 4 * 1024 * 1024
MAX_PIECES = 256

GONE = "gone"
NO_VERSION_YET = "no_version"
BAD_CHUNK = "bad_chunk"

SAME, FULL, DELTA = "same", "full", "delta"


class VersionGone(WeightsError):
    """These bytes of that version can no longer be had; a new manifest says what can."""

    code = GONE


class ManifestRequest(Message):
    """What leads to your newest version from the one that I have? have_version NO_BASE: I have none.

    want: rather to this version, if you keep what leads there from mine, because another publisher is no further.
    serves: the address at which I pass payloads on to others, empty: nowhere. avoid: sources that did not do.
    """

    have_lineage: str = ""
    have_version: int = NO_BASE
    want: int = NO_BASE
    serves: str = ""
    avoid: list[str] = []


class ManifestReply(Message):
    """Bulk frame 0 is the `Manifest`."""

    lineage: str
    version: int


class Piece(msgspec.Struct, array_like=True, frozen=True):
    """`length` bytes from `offset` of a tensor's payload: its delta from `base`, or with base NO_BASE its own bytes."""

    name: str
    base: int
    offset: int
    length: int


class ChunkRequest(Message):
    """Bytes of payloads that a manifest named: at most MAX_PIECES pieces and MAX_CHUNK_BYTES together."""

    lineage: str
    version: int
    pieces: list[Piece]


class ChunkReply(Message):
    """One bulk frame for each piece asked for, in order. gone: indices of pieces that can no longer be had; their frames are empty.

    later: the server is still pulling some piece itself; there are no frames, ask again.
    """

    gone: list[int] = []
    later: bool = False


class TensorEntry(msgspec.Struct, omit_defaults=True):
    """One tensor of a version and how to get it.

    kind: `same` (as in the base), `delta` (size bytes of codec payload that hash to payload_hash, to be applied to the base's
    tensor, which hashes to base_hash) or `full` (its own bytes). hash: xxh3_128 of the tensor's bytes, however they came.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    hash: str
    kind: str
    size: int = 0
    num_changed: int = 0
    payload_hash: str = ""
    base_hash: str = ""


class Manifest(msgspec.Struct, omit_defaults=True):
    """Every tensor that this server has of a version. base: what `same` and `delta` are relative to, or NO_BASE.

    digest covers these tensors. sources: a worker to take the payloads from instead of this server, which has them too.
    """

    lineage: str
    version: int
    digest: str
    tensors: list[TensorEntry]
    base: int = NO_BASE
    sources: list[str] = []


REQUESTS = (ManifestRequest, ChunkRequest)
REPLIES = (ManifestReply, ChunkReply, Ok, Error)
TYPES: dict[str, type[Message]] = {wire_name(cls): cls for cls in (*REQUESTS, *REPLIES)}
