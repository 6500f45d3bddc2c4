"""What a puller and a weight server say to each other. docs/weights.md describes each field and the sequence.

puller                               server
manifest_request (have)        ->
                               <-    manifest_reply + [manifest]
chunk_request (pieces)         ->    at most `credits` of them unanswered
                               <-    chunk_reply + [piece, piece, ...]
    a piece is gone                ->    ask for the manifest again
"""

import functools
from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from slimebus.bus.errors import FatalWeightsError, WeightsError
from slimebus.bus.messages import Error, Message, Ok, wire_name
from slimebus.weights.tensors import NO_BASE, STEPPED_DTYPES, TensorForm, digest_of, tensor_bytes

MAX_CHUNK_BYTES = 4 * 1024 * 1024
MAX_PIECES = 256

SAME: Final = "same"
FULL: Final = "full"
DELTA: Final = "delta"
Hash = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
"""Of a tensor; it names files, so nothing else passes."""
Size = Annotated[int, Meta(ge=0)]
ServerAddress = Annotated[str, Meta(max_length=512, pattern=r"^(tcp://.*)?\Z")]
"""Of a worker that passes payloads on: others hear it. Empty: none."""


class VersionGone(WeightsError):
    """These bytes are no longer stored; a new manifest says what is."""

    code = "gone"


class ManifestRequest(Message):
    """What leads to your newest version from the one that I have? have_version NO_BASE: I have none.

    want: rather to this version, if you keep what leads there from mine, because another publisher is no further.
    serves: the address at which I pass payloads on to others, empty: nowhere. avoid: sources that failed.
    """

    have_lineage: str = ""
    have_version: int = NO_BASE
    want: int = NO_BASE
    serves: ServerAddress = ""
    avoid: list[str] = []


class ManifestReply(Message):
    """Bulk frame 0 is the `Manifest`, the same bytes for all that ask for it. sources: a worker that has these payloads too."""

    lineage: str
    version: int
    sources: list[str] = []


class Piece(msgspec.Struct, array_like=True, frozen=True):
    """`length` bytes from `offset` of a tensor's payload: its delta from `base`, or with base NO_BASE its own bytes."""

    name: str
    base: int
    offset: Size
    length: Size


class ChunkRequest(Message):
    """Bytes of payloads that a manifest named: at most MAX_PIECES pieces and MAX_CHUNK_BYTES together."""

    lineage: str
    version: int
    pieces: Annotated[list[Piece], Meta(max_length=MAX_PIECES)]


class ChunkReply(Message):
    """One bulk frame for each piece asked for, in order. gone: indices of pieces that are no longer stored; their frames are empty.

    later: the server is still pulling some piece itself; there are no frames, ask again. is_pulling: False while it has not asked for that
    version yet, which is worth a moment's wait and no more.
    """

    gone: list[int] = []
    later: bool = False
    is_pulling: bool = True


class TensorEntry(msgspec.Struct, omit_defaults=True):
    """One tensor of a version and how to get it.

    kind: `same` (as in the base), `delta` (size bytes of codec payload of checksum payload_hash, to be applied to the base's
    tensor, which hashes to base_hash) or `full` (its own bytes). hash: of the tensor's bytes, however they came.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    hash: Hash
    kind: Literal["same", "full", "delta"]
    size: int = 0
    num_changed: Size = 0
    payload_hash: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")] = ""
    base_hash: Hash = ""

    @property
    def form(self) -> TensorForm:
        """What the tensor is."""
        return TensorForm(self.name, self.dtype, self.shape, self.hash)

    def check(self) -> None:
        """Raises WeightsError for what no publisher could have written and its types do not show."""
        bytes_ = tensor_bytes(self.name, self.dtype, self.shape)
        least, most = {SAME: (0, 0), FULL: (bytes_, bytes_), DELTA: (1, bytes_ - 1)}[self.kind]
        if not least <= self.size <= most:
            has = f"tensor {self.name!r}, {self.kind}, of {bytes_} bytes has a payload of {self.size} bytes"
            raise WeightsError(f"{has}; expected {least} to {most}")
        if self.kind == DELTA and (self.dtype not in STEPPED_DTYPES or not self.payload_hash or not self.base_hash):
            raise WeightsError(
                f"tensor {self.name!r} is a delta of {self.dtype}, hashes {self.payload_hash!r} and {self.base_hash!r}; "
                f"expected {' or '.join(sorted(STEPPED_DTYPES))}, a payload_hash and a base_hash"
            )
        if self.num_changed > bytes_:
            raise WeightsError(f"tensor {self.name!r} says that {self.num_changed} values changed")


class Manifest(msgspec.Struct, omit_defaults=True, dict=True):
    """Every tensor that this server has of a version. base: what `same` and `delta` are relative to, or NO_BASE.

    digest covers these tensors. sources: those of the reply.
    """

    lineage: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{0,128}\Z")]
    version: Size
    digest: str
    tensors: list[TensorEntry]
    base: int = NO_BASE
    sources: list[str] = []

    @functools.cached_property
    def encoded(self) -> bytes:
        """As it travels; encoded once for all that ask for it."""
        return msgspec.msgpack.encode(self)


def decode_manifest(data: Any, source: object) -> Manifest:
    """A manifest with all fields checked, and its digest. Raises WeightsError that names its source."""
    try:
        manifest = msgspec.msgpack.decode(data, type=Manifest)
        if not NO_BASE <= manifest.base <= manifest.version:
            raise WeightsError(f"it leads to version {manifest.version} from base {manifest.base}")
        for entry in manifest.tensors:
            entry.check()
            if entry.kind != FULL and manifest.base == NO_BASE:
                raise WeightsError(f"tensor {entry.name!r} is {entry.kind}, but there is no base")
        check_names(manifest.tensors)
        if (digest := digest_of(entry.form for entry in manifest.tensors)) != manifest.digest:
            raise WeightsError(f"digest {manifest.digest[:80]!r}, but its tensors have {digest}")
    except (msgspec.DecodeError, RecursionError) as bad:
        raise WeightsError(f"{source}: its manifest does not parse: {bad}") from None
    except WeightsError as bad:
        raise WeightsError(f"{source}: its manifest is wrong: {bad.text}") from None
    return manifest


def check_names(entries: Iterable[TensorEntry]) -> None:
    """Raises WeightsError when two of the tensors have one name."""
    twice = next((name for name, count in Counter(entry.name for entry in entries).items() if count > 1), None)
    if twice is not None:
        raise FatalWeightsError(f"tensor {twice!r} is served by two publishers, or twice by one")


TYPES: dict[str, type[Message]] = {wire_name(cls): cls for cls in (ManifestRequest, ChunkRequest, ManifestReply, ChunkReply, Ok, Error)}
