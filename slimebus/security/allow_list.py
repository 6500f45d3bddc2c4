"""The allow-list: which public keys may connect, under which name and role. Holds no secret.

{"clients": {"w1": {"role": "rollout", "public": "...", "client": "", "previous": "", "previous_until": 0, "until": 0, "revoked": false}}}
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from slimebus.bus.errors import UsageError
from slimebus.security.key_file import is_key, write_public
from slimebus.security.roles import MAY, ROLES

MAX_KEYS = 65536


class Entry(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One name of the list. `client`: the only name that its holder may join under; empty: any that no one else has.

    Times are seconds since the epoch. After a rotation `previous` is the older public key, good until `previous_until`. `until`: when the
    name ends by itself; 0: never.
    """

    role: str
    public: str
    client: str = ""
    previous: str = ""
    previous_until: float = 0.0
    until: float = 0.0
    revoked: bool = False

    def is_good(self, wall: float) -> bool:
        """Whether its holder is let in at the time `wall`."""
        return not self.revoked and not 0.0 < self.until <= wall


class AllowList(msgspec.Struct, kw_only=True):
    """Name of a key -> its entry."""

    clients: dict[str, Entry] = {}


class Grant(msgspec.Struct, frozen=True):
    """What the holder of one public key may do. `may`: message types; `client`: the only name it may speak under, if not empty."""

    name: str
    role: str
    client: str
    may: frozenset[str]


Grants = Mapping[str, Grant]
"""Public key -> what its holder may do."""


def grant(name: str, role: str, client: str = "") -> Grant:
    """The grant of a role."""
    return Grant(name, role, client, MAY[role])


def grants_of(allowed: AllowList, wall: float) -> dict[str, Grant]:
    """Every public key that is good at the time `wall`."""
    found: dict[str, Grant] = {}
    for name, entry in allowed.clients.items():
        publics = [entry.public, entry.previous] if wall < entry.previous_until else [entry.public]
        if entry.is_good(wall):
            found |= {public: grant(name, entry.role, entry.client) for public in publics if public}
    return found


def read_allow_list(path: Path) -> AllowList:
    """The list of a file. Raises UsageError naming the file, the entry and the remedy."""
    try:
        allowed = msgspec.json.decode(path.read_bytes(), type=AllowList)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such allow-list; `slimebus keys init` makes one") from None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as bad:
        raise UsageError(f"{path}: not an allow-list: {bad}") from None
    _check_list(path, allowed)
    return allowed


def _check_list(path: Path, allowed: AllowList) -> None:
    if len(allowed.clients) > MAX_KEYS:
        raise UsageError(f"{path}: {len(allowed.clients)} keys; at most {MAX_KEYS}")
    owners: dict[str, str] = {}
    for name, entry in allowed.clients.items():
        if entry.role not in ROLES:
            raise UsageError(f"{path}: {name}: role {entry.role!r}; expected one of {', '.join(ROLES)}")
        for public in filter(None, (entry.public, entry.previous)):
            if not is_key(public):
                raise UsageError(f"{path}: {name}: {public[:60]!r} is not a public key of 40 characters of Z85")
            if owners.setdefault(public, name) != name:
                raise UsageError(f"{path}: {name} and {owners[public]} have the same public key; give each its own")


def write_allow_list(path: Path, allowed: AllowList) -> None:
    """Replace the file in one move; a running broker takes it up within two seconds."""
    write_public(path, msgspec.json.format(msgspec.json.encode(allowed), indent=1) + b"\n")
