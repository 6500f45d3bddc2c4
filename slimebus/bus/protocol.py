"""Which version of the protocol two processes speak: the newest that both understand, or an error that names both sides.

client 1..3, broker 1..2 -> 2          client 3..4, broker 1..2 -> protocol_version
"""

import functools
import importlib.metadata

from slimebus.bus.errors import ProtocolError
from slimebus.bus.messages import OLDEST_PROTOCOL, PROTOCOL_VERSION

NEGOTIATING = ("hello", "welcome", "error")
"""Their headers are readable in every version, so that processes of any two releases can tell each other what they speak."""
MAX_RELEASE_CHARS = 64


@functools.cache
def release() -> str:
    """The release of this installation; `unreleased` when it runs from a source tree that is not installed."""
    try:
        return importlib.metadata.version("slimebus")
    except importlib.metadata.PackageNotFoundError:
        return "unreleased"


def spoken(oldest: int = OLDEST_PROTOCOL, newest: int = PROTOCOL_VERSION) -> str:
    """A range of versions in words: `1`, or `1 to 3`."""
    return str(newest) if oldest == newest else f"{oldest} to {newest}"


def is_spoken(version: int, kind: str) -> bool:
    """True when a header of this version and message type can be read."""
    return OLDEST_PROTOCOL <= version <= PROTOCOL_VERSION or (kind in NEGOTIATING and version > 0)


def choose(oldest: int, newest: int, *, who: str, their_release: str = "") -> int:
    """The newest version that a peer speaking oldest..newest and this process both understand.

    Raises ProtocolError (`protocol_version`) with both ranges and both releases when there is none.
    """
    chosen = min(newest, PROTOCOL_VERSION)
    if oldest <= newest and chosen >= max(oldest, OLDEST_PROTOCOL):
        return chosen
    theirs = f" (slimebus {their_release[:MAX_RELEASE_CHARS]})" if their_release else ""
    raise _mismatch(f"{who}{theirs} speaks protocol {spoken(oldest, newest)}")


def unreadable(version: int) -> ProtocolError:
    """The error for a header of a version that is not spoken here."""
    return _mismatch(f"protocol version {version}")


def _mismatch(theirs: str) -> ProtocolError:
    text = f"{theirs}, this process (slimebus {release()}) speaks {spoken()}; run the same slimebus release everywhere"
    return ProtocolError(text, code="protocol_version")
