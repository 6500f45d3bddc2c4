"""One process's key: a CURVE key pair, its name and role, and the broker's public keys, in a JSON file of mode 0600.

    {"name": "w1", "role": "rollout", "public": "...", "secret": "...", "broker": ["..."]}

Keys are Z85 text of 40 characters, as everywhere in ZeroMQ. The broker's own file has the role `broker`.
"""

import logging
import stat
import string
from pathlib import Path

import msgspec

from slimebus.atomic_file import replacing
from slimebus.bus.errors import UsageError

log = logging.getLogger("slimebus.security")

BROKER = "broker"
SUFFIX = ".key"
Z85_CHARS = 40
Z85 = frozenset(string.digits + string.ascii_letters + ".-:+=^!/*?&<>()[]{}@%$#")


class KeyPair(msgspec.Struct, kw_only=True, frozen=True):
    """A CURVE key pair, Z85."""

    public: str
    secret: str


class KeyFile(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """What stands in a key file. `broker`: public keys, one of them the broker's; `next`: the broker's pair after a rotation."""

    name: str
    role: str
    public: str
    secret: str
    broker: list[str] = []
    next: KeyPair | None = None

    @property
    def pair(self) -> KeyPair:
        """The key pair alone."""
        return KeyPair(public=self.public, secret=self.secret)


def is_key(text: str) -> bool:
    """True for 40 characters of Z85."""
    return len(text) == Z85_CHARS and set(text) <= Z85


def make_pair() -> KeyPair:
    """A new random key pair."""
    import zmq

    public, secret = zmq.curve_keypair()
    return KeyPair(public=public.decode(), secret=secret.decode())


def read_key(path: Path) -> KeyFile:
    """The key of a file. Raises UsageError naming the file and the remedy; warns of one that others can read."""
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            log.warning("%s can be read by other users; `chmod 600 %s`", path, path)
        key = msgspec.json.decode(path.read_bytes(), type=KeyFile)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such key file; `slimebus keys add` makes it on the broker's machine") from None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as bad:
        raise UsageError(f"{path}: not a key file: {bad}; copy it again from the broker's machine") from None
    if not all(map(is_key, (key.public, key.secret, *key.broker))):
        what = f"a key that is not {Z85_CHARS} characters of Z85"
        raise UsageError(f"{path}: not a key file: {what}; copy it again from the broker's machine")
    return key


def write_public(path: Path, content: bytes) -> None:
    """Replace a file that everyone may read, in one move."""
    with replacing(path) as file:
        file.write(content)


def write_key(path: Path, key: KeyFile) -> None:
    """Replace a key file in one move, readable by its owner alone at every moment."""
    with replacing(path, mode=0o600) as file:
        file.write(msgspec.json.format(msgspec.json.encode(key), indent=1) + b"\n")
