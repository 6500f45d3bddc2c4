"""The folder of keys on the broker's machine, and what people do with it.

KEYS/                    mode 0700
  broker.key             0600   the broker's key pair: stays on the broker's machine
  broker.pub             0644   its public key, one line
  allowed.json           0644   public keys, names, roles: who may connect
  trainer.key            0600   one file for each key: copy it to the machine that uses it, and nothing else
  rollout.key  ...
"""

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from slimebus.bus.errors import UsageError
from slimebus.security.allow_list import AllowList, Entry, read_allow_list, write_allow_list
from slimebus.security.key_file import BROKER, SUFFIX, KeyFile, is_key, make_pair, read_key, write_key, write_public
from slimebus.security.roles import ROLES

BROKER_KEY = f"{BROKER}{SUFFIX}"
BROKER_PUBLIC = f"{BROKER}.pub"
ALLOWED = "allowed.json"
FIRST_KEYS = ("trainer", "rollout", "client")
"""Made by `init`: one key of each role that a run needs."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def init(folder: Path) -> None:
    """Make the broker's key pair, an allow-list, and a key of each role that a run needs. Raises UsageError when there are keys."""
    if (folder / BROKER_KEY).exists() or (folder / ALLOWED).exists():
        raise UsageError(f"{folder} has keys already; add to them with `slimebus keys add NAME --role ROLE`, or give another folder")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    pair = make_pair()
    write_key(folder / BROKER_KEY, KeyFile(name=BROKER, role=BROKER, public=pair.public, secret=pair.secret))
    write_public(folder / BROKER_PUBLIC, pair.public.encode() + b"\n")
    write_allow_list(folder / ALLOWED, AllowList())
    for role in FIRST_KEYS:
        add(folder, role, role)


def add(folder: Path, name: str, role: str, *, client: str = "", public: str = "", until: float = 0.0) -> Path | None:
    """Let a new key in, and return its file; None when only a `public` key was given, with its secret elsewhere. until: as of Entry."""
    with _changing(folder) as allowed:
        _check_new(folder, allowed, name, role, public)
        allowed.clients[name] = Entry(role=role, public=public, client=client, until=until)
        return None if public else _make_key(folder, allowed, name)


@contextlib.contextmanager
def _changing(folder: Path) -> Iterator[AllowList]:
    """The allow-list, written when the context ends without an error; others who change the folder wait until then."""
    if not folder.is_dir():
        read_allow_list(folder / ALLOWED)  # raises UsageError
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        allowed = read_allow_list(folder / ALLOWED)
        yield allowed
        write_allow_list(folder / ALLOWED, allowed)
    finally:
        os.close(lock)


def _make_key(folder: Path, allowed: AllowList, name: str) -> Path:
    """A new key pair for an entry of the list: its file."""
    pair, entry, path = make_pair(), allowed.clients[name], folder / f"{name}{SUFFIX}"
    entry.public = pair.public
    write_key(path, KeyFile(name=name, role=entry.role, public=pair.public, secret=pair.secret, broker=broker_keys(folder)))
    return path


def _check_new(folder: Path, allowed: AllowList, name: str, role: str, public: str) -> None:
    if not NAME.fullmatch(name) or name == BROKER:
        raise UsageError(f"key name {name!r}; expected 1 to 64 letters, digits, dots, dashes or underscores, and not {BROKER!r}")
    if role not in ROLES:
        raise UsageError(f"role {role!r}; expected one of {', '.join(ROLES)}")
    known = allowed.clients.get(name)
    if known is not None and known.is_good(time.time()):
        raise UsageError(f"{folder} has a key {name!r} already; `slimebus keys rotate {name}` replaces it, or choose another name")
    if public and not is_key(public):
        raise UsageError(f"public key {public[:60]!r}; expected 40 characters of Z85")
    if public and public in {e.public for e in allowed.clients.values()}:
        raise UsageError(f"{folder} has this public key already, under another name")


def broker_keys(folder: Path) -> list[str]:
    """The public keys that a client is to accept of the broker: its own, and while it is being rotated the next one."""
    key = read_key(folder / BROKER_KEY)
    return [key.public, *([key.next.public] if key.next else [])]


def revoke(folder: Path, name: str) -> None:
    """Revoke a key. Raises UsageError when there is none."""
    with _changing(folder) as allowed:
        _entry(folder, allowed, name).revoked = True


def rotate(folder: Path, name: str, *, grace_s: float) -> Path:
    """Replace a key pair; the older one stays valid for `grace_s` seconds. Returns the file to copy."""
    with _changing(folder) as allowed:
        entry = _entry(folder, allowed, name)
        entry.previous, entry.previous_until = (entry.public, time.time() + grace_s) if grace_s > 0 else ("", 0.0)
        return _make_key(folder, allowed, name)


def _entry(folder: Path, allowed: AllowList, name: str) -> Entry:
    entry = allowed.clients.get(name)
    if entry is None or not entry.is_good(time.time()):
        names = ", ".join(n for n, e in allowed.clients.items() if e.is_good(time.time())) or "none"
        raise UsageError(f"{folder} has no key {name!r} to change; there are: {names}")
    return entry


def prepare_broker(folder: Path) -> list[Path]:
    """Make the broker's next key pair and write its public key into every key file of the folder; the files to copy."""
    key = read_key(folder / BROKER_KEY)
    if key.next is None:
        key = msgspec.structs.replace(key, next=make_pair())
        write_key(folder / BROKER_KEY, key)
    return _tell_clients(folder)


def switch_broker(folder: Path) -> list[Path]:
    """From now on the broker has its next key; a running one takes it up by itself. The files to copy to those not prepared."""
    key = read_key(folder / BROKER_KEY)
    pair = key.next or make_pair()
    write_key(folder / BROKER_KEY, msgspec.structs.replace(key, public=pair.public, secret=pair.secret, next=None))
    write_public(folder / BROKER_PUBLIC, pair.public.encode() + b"\n")
    return _tell_clients(folder)


def _tell_clients(folder: Path) -> list[Path]:
    wanted = broker_keys(folder)
    paths = [path for path in sorted(folder.glob(f"*{SUFFIX}")) if path.name != BROKER_KEY]
    for path in paths:
        write_key(path, msgspec.structs.replace(read_key(path), broker=wanted))
    return paths
