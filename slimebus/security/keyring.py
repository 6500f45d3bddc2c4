"""The keys of a process that serves: its own pair, and the keys it accepts. Lists change while it runs.

KEYS/broker.key, KEYS/allowed.json --read again when they change--> FolderKeyring     (broker)
the broker's answer to `keys`      --------------------------------> PullKeyring      (a weight server)
"""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from slimebus.bus.errors import ProtocolError, UsageError
from slimebus.security.allow_list import Grant, Grants, grant, grants_of, read_allow_list
from slimebus.security.key_file import BROKER, KeyPair, is_key, read_key
from slimebus.security.key_folder import ALLOWED, BROKER_KEY
from slimebus.security.roles import ROLES

log = logging.getLogger("slimebus.security")


class Keyring(Protocol):
    """What a server needs. `grants` is replaced as a whole, so one thread may read what another one changes.

    generation: rises with each change of `grants` or `pair`. problem: why the newest list could not be taken up, or nothing.
    """

    pair: KeyPair
    grants: Grants
    generation: int
    problem: str

    def refresh(self) -> None:
        """Take up what changed; called about once a second from one thread."""


class FolderKeyring:
    """The keys of a folder, read again when its files change. A file that does not parse changes nothing, and is logged as an error."""

    def __init__(self, folder: Path, wall: Callable[[], float] = time.time) -> None:
        """Raises UsageError when the folder has no broker's key or no allow-list."""
        self.folder, self._wall = folder, wall
        self.generation, self.problem = int(1000 * wall()), ""  # no generation of an earlier process comes again
        self._stamps = self._stamp()
        self.pair, self.grants = self._read()

    def _read(self) -> tuple[KeyPair, Grants]:
        key = read_key(self.folder / BROKER_KEY)
        if key.role != BROKER:
            raise UsageError(f"{self.folder / BROKER_KEY} is the key of a {key.role}; expected the broker's; `slimebus keys init` makes it")
        self._allowed = read_allow_list(self.folder / ALLOWED)
        return key.pair, grants_of(self._allowed, self._wall())

    def _stamp(self) -> list[tuple[int, int, int] | None]:
        return [_stamp(self.folder / name) for name in (BROKER_KEY, ALLOWED)]

    def refresh(self) -> None:
        """Take up changed files, and drop keys after their time."""
        stamps = self._stamp()
        if stamps != self._stamps:
            self._stamps = stamps
            self._reload()
        elif (grants := grants_of(self._allowed, self._wall())) != self.grants:  # the time of a rotated key is over
            self.grants, self.generation = grants, self.generation + 1

    def _reload(self) -> None:
        try:
            pair, grants = self._read()
        except UsageError as bad:
            self.problem = f"{bad.text}; the list read before stays in force"
            log.error("keys: %s", self.problem)
            return
        if self.problem or pair != self.pair or grants != self.grants:
            log.info("keys of %s taken up: %d allowed", self.folder, len(grants))
        self.problem = ""
        self.pair, self.grants, self.generation = pair, grants, self.generation + 1


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def rows_of(grants: Grants) -> bytes:
    """The wire form of a list: JSON, one [public, name, role] for each key."""
    return msgspec.json.encode([(public, held.name, held.role) for public, held in grants.items()])


def grants_from(rows: bytes | memoryview) -> dict[str, Grant]:
    """The list of its wire form. Raises ProtocolError. A role that is not known here is left out."""
    try:
        found: Sequence[tuple[str, str, str]] = msgspec.json.decode(bytes(rows), type=list[tuple[str, str, str]])
    except (msgspec.DecodeError, UnicodeDecodeError) as bad:
        raise ProtocolError(f"keys_reply: {bad}") from None
    return {public: grant(name, role) for public, name, role in found if is_key(public) and role in ROLES}
