"""The key with which a process speaks to the broker, found in the run's config and read again when it was replaced."""

from pathlib import Path

from slimebus.bus.errors import UsageError
from slimebus.security.key_file import BROKER, SUFFIX, KeyFile, KeyPair, read_key

KEYS_FOR: dict[str, tuple[str, ...]] = {"viewer": ("viewer", "client", "trainer", "rollout", "consumer")}
"""Roles of keys that will do for a role, the best first; for others only the role's own."""


class Credentials:
    """A key file and the broker's public keys that it names. Used by one thread."""

    def __init__(self, path: Path) -> None:
        """Raises UsageError when the file is not a client's key."""
        self.path, self._turn = path, 0
        self.key = _client_key(path)

    @property
    def pair(self) -> KeyPair:
        """Our own key pair."""
        return self.key.pair

    @property
    def server(self) -> str:
        """The public key to expect of the broker."""
        return self.key.broker[self._turn % len(self.key.broker)]

    def is_replaced(self) -> bool:
        """True once when the file holds another key than the one in use, which is taken up."""
        used = self.key.public
        self._read_again()
        return self.key.public != used

    def after_refusal(self) -> None:
        """The handshake failed: read the file again, which may have been replaced, and expect the next of the broker's keys."""
        self._turn += 1
        self._read_again()

    def _read_again(self) -> None:
        try:
            self.key = _client_key(self.path)
        except UsageError:
            return  # in the middle of being copied: the one we have will do until the next try


def _client_key(path: Path) -> KeyFile:
    key = read_key(path)
    if key.role == BROKER or not key.broker:
        raise UsageError(f"{path} is not the key of a client; expected a file made by `slimebus keys add NAME --role ROLE`")
    return key


def credentials_of(keys_path: Path | None, role: str) -> Credentials | None:
    """The key that a config names for a role; None when it names no keys. Raises UsageError when there is none, or too many."""
    return None if keys_path is None else credentials_at(keys_path, role)


def credentials_at(place: Path, role: str) -> Credentials:
    """The key for a role in a folder, or of a key file. Raises UsageError."""
    return Credentials(place if place.is_file() or place.suffix == SUFFIX else _only(place, role))


def _only(folder: Path, role: str) -> Path:
    if not folder.is_dir():
        raise UsageError(f"security.keys: no folder or key file at {folder}; `slimebus keys init` makes a folder on the broker's machine")
    keys = [(path, read_key(path)) for path in sorted(folder.glob(f"*{SUFFIX}"))]
    for wanted in KEYS_FOR.get(role, (role,)):
        fitting = [path for path, key in keys if key.role == wanted]
        exact = [path for path in fitting if path.name == f"{wanted}{SUFFIX}"]
        if len(exact or fitting) == 1:
            return (exact or fitting)[0]
        if fitting:
            remedy = f"choose one with --keys {folder}/NAME{SUFFIX}"
            raise UsageError(f"security.keys: {folder} has {len(fitting)} keys of role {wanted}; {remedy}")
    remedy = f"make one on the broker's machine with `slimebus keys add NAME --role {role}` and copy its file here"
    raise UsageError(f"security.keys: {folder} has no key of role {role}; {remedy}")
