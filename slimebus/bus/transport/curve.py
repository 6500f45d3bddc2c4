"""What every socket needs before it binds or connects: CURVE, an end to connections that are dead, and why a handshake failed, in words.

libzmq says nothing to the one who waits: a refused client only sees silence. Its monitor sockets tell why.
"""

from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from slimebus.security.key_file import KeyPair

ZAP_DOMAIN = b"slimebus"
REFUSED = 400
FULL = 500
"""ZAP status codes, which reach the client: this key is not allowed, and the server's connections are used up."""
_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
CLIENT_EVENTS = _FAILURES | zmq.EVENT_HANDSHAKE_SUCCEEDED
SERVER_EVENTS = _FAILURES | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED


DEAD_S = 20
"""A connection is closed when its other side acknowledges nothing, or reads none of what waits for it, for so long."""


def close_dead_connections(socket: Any) -> None:
    """Have the kernel find and close them (docs/decisions/no-zmtp-heartbeats.md); of a socket that is not bound or connected yet."""
    socket.tcp_keepalive, socket.tcp_keepalive_idle, socket.tcp_keepalive_intvl, socket.tcp_keepalive_cnt = 1, DEAD_S // 2, DEAD_S // 4, 2
    socket.tcp_maxrt = DEAD_S * 1000


def serve_curve(socket: Any, pair: KeyPair) -> None:
    """Listeners bound from now on take CURVE clients only, under this key."""
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = pair.public.encode(), pair.secret.encode()


def watch_handshakes(socket: Any, events: int = CLIENT_EVENTS) -> Any:
    """A PAIR socket that tells of the handshakes of `socket`; `end_watch` closes it."""
    return socket.get_monitor_socket(events)


def end_watch(socket: Any, monitor: Any) -> None:
    """Close what `watch_handshakes` opened; before the socket itself is closed."""
    socket.disable_monitor()
    monitor.close(linger=0)


def handshakes(monitor: Any) -> list[tuple[int, int]]:
    """(event, value) of what happened since the last call."""
    found = []
    while monitor.poll(0):
        try:
            told = recv_monitor_message(monitor, zmq.NOBLOCK)
        except zmq.ZMQError:
            break
        found.append((int(told["event"]), int(told["value"])))
    return found


def refusal(event: int, value: int, *, server: str, key: str) -> str:
    """Why a server did not take us in; empty for an event that is no failure. key: the file or name of our key, empty without."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and value == FULL:
        return f"the {server} has no room for another connection (broker.max_clients)"
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        remedy = "`slimebus keys ls` on the broker's machine shows the list, `slimebus keys add` makes a key"
        return f"the {server} refused our key {key}: it is not on its allow-list, or revoked; {remedy}"
    if event not in (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL):
        return ""
    is_mismatch = event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
    if is_mismatch and key:
        return f"the {server} at this address serves without keys, but we were given {key}; check the address, or start it with its keys"
    if key:
        why = f"its key was replaced (copy the key file again from the broker's machine), it is another {server}, or it serves without keys"
        return f"the {server} has another key than {key} expects of it: {why}"
    nobody = "takes nobody without a key; give the folder of this machine's key with --keys"
    if is_mismatch:
        return f"the {server} {nobody} (`slimebus keys add` makes one)"
    return f"the {server} ended the handshake: it {nobody} (or what listens there is no {server})"
