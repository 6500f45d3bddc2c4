"""Changes of a run's buffer: asked of its broker, or made by one that lives for the moment where none is running."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from broker.buffer.reader import live_endpoint
from slimebus.commands.status import ask_status
from slimebus.config import Resolved
from slimebus.errors import SlimebusError, UsageError
from slimebus.joining import client_of, process_name
from slimebus.messages import Edit, EditReply, Message
from slimebus.transport.client import Client

GROUPS_A_REQUEST = 100
"""Ids and the reasons for refusals must fit a header of 64 KiB."""
Change = Callable[[Message, Sequence[Any]], EditReply]


class Asking(NamedTuple):
    """A broker that answers: `edit` has a change made, durably, before it returns; `client` speaks to it."""

    edit: Change
    client: Client


@contextlib.contextmanager
def asking(resolved: Resolved, file: Path | None, address: str | None, timeout_s: float) -> Iterator[Asking]:
    """Someone who makes changes. Raises SlimebusError.

    address: of the broker; None: the one that has the run's store open, or, where none has, one started for the moment.
    """
    endpoint = address or live_endpoint(resolved.run_dir / "broker")
    if endpoint is not None:
        with _client(resolved, _reachable(endpoint) or None) as client:
            yield Asking(lambda message, bulk: _asked(client, message, bulk, timeout_s), client)
        return
    if file is None:
        raise UsageError(
            f"no broker has the store under {resolved.run_dir} open; give the RUN.yaml, so that it can be changed without one, or --broker"
        )
    with _momentary_broker(resolved) as alone, _client(resolved, alone) as client:
        yield Asking(lambda message, bulk: _asked(client, message, bulk, timeout_s), client)


def _reachable(endpoint: str) -> str:
    return endpoint.replace("//0.0.0.0", "//127.0.0.1").replace("//*", "//127.0.0.1")


@contextlib.contextmanager
def _client(resolved: Resolved, endpoint: str | None) -> Iterator[Client]:
    client = client_of(resolved, endpoint, role="client", name=process_name("buffer"))
    try:
        yield client
    finally:
        client.close(goodbye=False)


def _asked(client: Client, message: Message, bulk: Sequence[Any], timeout_s: float) -> EditReply:
    reply = client.call(message, bulk, timeout_s=timeout_s).message
    if not isinstance(reply, EditReply):
        raise SlimebusError(f"broker answered with {type(reply).__name__}", code="protocol")
    return reply


@contextlib.contextmanager
def _momentary_broker(resolved: Resolved) -> Iterator[str]:
    """The run's own broker on a loopback port that nobody knows, for as long as the change takes."""
    import msgspec

    from broker.process import build

    config = resolved.config
    quiet = msgspec.structs.replace(config, broker=msgspec.structs.replace(config.broker, bind="tcp://127.0.0.1:0", hints_bind=""))
    broker = build(Resolved(quiet, resolved.origin, resolved.base))
    stop = threading.Event()
    thread = threading.Thread(target=broker.run, args=(stop,), name="broker")
    thread.start()
    try:
        yield broker.endpoint
    finally:
        stop.set()
        thread.join()


def edit_all(ask: Change, action: str, groups: Sequence[str], reason: str) -> EditReply:
    """Edit any number of groups, some at a time."""
    total = EditReply()
    for start in range(0, len(groups), GROUPS_A_REQUEST):
        reply = ask(Edit(action=action, groups=list(groups[start : start + GROUPS_A_REQUEST]), reason=reason), ())
        total.done.update(reply.done)
        total.refused.update(reply.refused)
    return total


def lineage_of(asking: Asking) -> str:
    """The run's lineage. Raises UsageError for a run without a trainer."""
    lineage = str(ask_status(asking.client, 10.0)["lineage"])
    if not lineage:
        raise UsageError("import --as-version: no trainer has joined this run yet, so it has no version; import once it has")
    return lineage
