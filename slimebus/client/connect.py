"""How a process connects to its broker: the address it was given, tried until a deadline, with a log line every few seconds."""

import contextlib
import fcntl
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from slimebus.bus.errors import SlimebusError, Unreachable, UsageError
from slimebus.bus.messages import Heartbeat, Welcome
from slimebus.config import Resolved
from slimebus.config.agreement import COMPARED, settings_of
from slimebus.security.credentials import credentials_of
from slimebus.security.exposure import reachable

if TYPE_CHECKING:
    from slimebus.bus.transport.client import Client

log = logging.getLogger("slimebus")

ANSWER_S = 5.0
BROKER_AWAY_S = 600.0
"""A member waits so long for an answer: a broker may be restarted, on another machine, or wait for its disk."""
CONNECT_S, LISTEN_POLL_S = 1.0, 0.2
RESTART_S = 3.0
"""A broker that is restarted listens within this."""
NAME_IN_DOUBT = "name_in_doubt"
"""Code of the answer to a hello while the broker waits for a sign of the process that has the name."""
WRONGLY_ASKED = ("forbidden", "no_dataset")
"""Codes of errors that a person mends by giving another key or name."""


def broker_address(resolved: Resolved, given: str | None) -> str:
    """The broker's address as seen from this machine: the one given, else that of the broker in the run directory, else broker.bind.

    Raises Unreachable where broker.bind has port 0 and no broker works in the run directory.
    """
    bind = resolved.config.broker.bind
    found = given or live_endpoint(resolved.run_dir) or bind
    if found == bind and bind.endswith(":0"):
        raise Unreachable(f"no broker works in {resolved.run_dir}, and broker.bind {bind} names no port; start it, or give its --broker")
    return found if given else reachable(found)


def live_endpoint(run_dir: Path) -> str:
    """Where the broker that works in this run directory, on this machine, listens; empty where none does."""
    with contextlib.suppress(OSError, ValueError), (run_dir / "broker" / "owner.lock").open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return str(dict(json.load(lock)).get("endpoint", ""))
    return ""


def make_client(resolved: Resolved, given: str | None, *, role: str, name: str) -> "Client":
    """A client of the run's broker, with the key of this config for `role`. Raises UsageError when there is no such key."""
    from slimebus.bus.transport.client import Client  # zmq and asyncio: no --help needs them

    client = Client(broker_address(resolved, given), name=name, credentials=credentials_of(resolved.keys_path, role))
    client.settings = settings_of(resolved, role) if role in COMPARED else {}
    return client


def is_listening(address: str) -> bool:
    """Whether anything accepts connections at `tcp://HOST:PORT`; a port 0 is nobody's."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S):
            return port != "0"
    except (OSError, ValueError):
        return False


def check_listening(address: str, wait_s: float) -> None:
    """Raise Unreachable when nothing has listened at an address for so long."""
    until = time.monotonic() + wait_s
    while not is_listening(address):
        if time.monotonic() > until:
            waited = f" (waited {wait_s:g} s)" if wait_s else ""
            raise Unreachable(f"no broker listens at {address}{waited}; has its run ended, or is the address another?")
        time.sleep(LISTEN_POLL_S)


@contextlib.contextmanager
def connect_without_joining(
    resolved: Resolved, given: str | None, *, what: str, role: str = "client", patience_s: float | None = None
) -> "Iterator[Client]":
    """A client for a few requests, under a name of its own that begins with `what`; it connects without registering.

    Where the user named a run, a broker of another one refuses the requests as `wrong_run`. Raises Unreachable when nothing has listened
    at the address for `patience_s` seconds; None: it is not looked.
    """
    if patience_s is not None:
        check_listening(broker_address(resolved, given), patience_s)
    client = make_client(resolved, given, role=role, name=process_name(what))
    client.run = resolved.expected_run
    try:
        yield client
    except SlimebusError as bad:
        if bad.code in WRONGLY_ASKED:
            raise UsageError(bad.text, code=bad.code) from None
        raise
    finally:
        client.close(goodbye=False)


def process_name(role: str) -> str:
    """A name no other process has: role, host, process id and a little chance."""
    return f"{role}-{socket.gethostname()[:24]}-{os.getpid()}-{secrets.token_hex(2)}"


def join(client: "Client", role: str, timeout_s: float, *, take_over: bool = False) -> Welcome:
    """Join; every few seconds log what is waited for. Differences of settings are logged. Raises Unreachable after `timeout_s`.

    take_over: replace a living process of this name and role. Without it, SlimebusError `name_in_use` is raised where there is one.
    """
    waited = 0.0
    while True:
        patience = min(ANSWER_S, timeout_s - waited)
        try:
            welcome = client.join(role, timeout_s=patience, take_over=take_over)
        except SlimebusError as bad:
            waited += patience
            if bad.code == NAME_IN_DOUBT and waited < timeout_s:
                continue
            if not isinstance(bad, Unreachable):
                raise
            if waited >= timeout_s:
                remedy = client.refusal or "start one with `slimebus broker RUN.yaml`, or give its address with --broker"
                raise Unreachable(f"{role} {client.name}: no broker answered at {client.address} in {timeout_s:.0f} s; {remedy}") from None
            why = f": {client.refusal}" if client.refusal else ""
            log.info("waiting for the broker at %s (%.0f of %.0f s)%s", client.address, waited, timeout_s, why)
            continue
        for difference in welcome.differences:
            log.warning("%s", difference)
        return welcome


def log_refusal(problem: SlimebusError) -> None:
    """Log why the broker refuses this process from now on."""
    log.error("%s", problem.text)


def report_starting(client: "Client", welcome: Welcome, what: str, on_lost: Callable[[SlimebusError], None] = log_refusal) -> None:
    """Until `keep_alive` is called again, tell the broker that this process lives and what it does; a model may take minutes to load."""
    beat = Heartbeat(state=f"starting: {what}")
    client.keep_alive(welcome.heartbeat_s, lambda: beat, lambda reply: None, on_lost)
