"""What a broker with keys does besides serving: it tells the allow-list to the trainer, and acts on what changes in it.

revoked key   -> its holders are taken out of the run, subscribers to hints must prove themselves anew
new own pair  -> listeners are opened anew under it; connections that are open stay
"""

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from slimebus.bus.messages import Keys, KeysReply
from slimebus.bus.transport.server import Request, Server
from slimebus.security.exposure import insecure_note
from slimebus.security.keyring import Keyring, rows_of

log = logging.getLogger("slimebus.broker")


class KeyringChange(NamedTuple):
    """What is new in the keys: names and public keys that were revoked, and whether the broker has another pair."""

    revoked: frozenset[str]
    is_narrower: bool
    is_renewed: bool


class KeyringWatcher:
    """Follows a keyring for one server. Used by the broker's thread."""

    def __init__(self, server: Server, keyring: Keyring) -> None:
        self.server, self.keyring = server, keyring
        self._generation, self._grants, self._pair = keyring.generation, keyring.grants, keyring.pair

    def answer_keys(self, requests: Sequence[Request]) -> list[Request]:
        """Answer those that ask for the allow-list; the others."""
        others = [request for request in requests if not isinstance(request.message, Keys)]
        for request in requests if len(others) < len(requests) else ():
            if isinstance(request.message, Keys):
                generation = self.keyring.generation
                bulk = [] if request.message.have == generation else [rows_of(self.keyring.grants)]
                self.server.reply(request, KeysReply(generation=generation), bulk)
        return others

    def change(self) -> KeyringChange | None:
        """What changed since the last call; None when nothing did."""
        keyring = self.keyring
        if keyring.generation == self._generation:
            return None
        before, pair = self._grants, self._pair
        self._generation, self._grants, self._pair = keyring.generation, keyring.grants, keyring.pair
        names = {held.name for held in self._grants.values()}
        revoked = frozenset(held.name for held in before.values()) - names
        return KeyringChange(revoked, bool(before.keys() - self._grants.keys()), pair != self._pair)


def security(endpoint: str, keyring: Keyring | None) -> dict[str, Any]:
    """The `security` section of the status: how connections are protected, how many keys are allowed, and what is wrong."""
    if keyring is None:
        return {"transport": "plain", "keys": 0, "problem": insecure_note(endpoint)}
    return {"transport": "curve", "keys": len(keyring.grants), "problem": keyring.problem}
