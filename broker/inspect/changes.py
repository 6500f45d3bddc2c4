"""Changes of a run's buffer: asked of its broker, or made by a temporary one where none is running."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slimebus.bus.errors import UsageError
from slimebus.bus.messages import Edit, EditReply, Message
from slimebus.bus.transport.client import Client
from slimebus.client.connect import connect_without_joining, live_endpoint
from slimebus.config import Resolved
from slimebus.security.exposure import reachable

GROUPS_A_REQUEST = 100
"""Ids and the reasons for refusals must fit one header."""


class BufferEditor(NamedTuple):
    """Changes a run through its broker; each change is durable before it returns."""

    client: Client
    timeout_s: float

    def edit(self, message: Message, bulk: Sequence[Any] = ()) -> EditReply:
        """Have one change made."""
        return self.client.call(message, bulk, timeout_s=self.timeout_s).expect(EditReply)

    def edit_all(self, action: str, groups: Sequence[str], reason: str) -> EditReply:
        """Edit any number of groups, some at a time."""
        total = EditReply()
        for start in range(0, len(groups), GROUPS_A_REQUEST):
            reply = self.edit(Edit(action=action, groups=list(groups[start : start + GROUPS_A_REQUEST]), reason=reason))
            total.done.update(reply.done)
            total.refused.update(reply.refused)
        return total


@contextlib.contextmanager
def open_editor(resolved: Resolved, file: Path | None, address: str | None, timeout_s: float) -> Iterator[BufferEditor]:
    """The editor of a run's buffer. Raises SlimebusError.

    address: of the broker; None: the one that has the run's store open, or, where none has, a temporary one.
    """
    with contextlib.ExitStack() as stack:
        endpoint = address or live_endpoint(resolved.run_dir)
        if not endpoint and file is None:
            remedy = "give the RUN.yaml, so that it can be changed without one, or --broker"
            raise UsageError(f"no broker has the store under {resolved.run_dir} open; {remedy}")
        if not endpoint:
            endpoint = stack.enter_context(_temporary_broker(resolved))
        yield BufferEditor(stack.enter_context(connect_without_joining(resolved, reachable(endpoint), what="buffer")), timeout_s)


@contextlib.contextmanager
def _temporary_broker(resolved: Resolved) -> Iterator[str]:
    """The run's own broker on a loopback port that nobody knows, for as long as the change takes."""
    import msgspec

    from broker.main import build_broker

    config = resolved.config
    quiet = msgspec.structs.replace(config, broker=msgspec.structs.replace(config.broker, bind="tcp://127.0.0.1:0", hints_bind=""))
    broker = build_broker(Resolved(quiet, resolved.origin, resolved.base))
    stop = threading.Event()
    thread = threading.Thread(target=broker.run, args=(stop,), name="broker")
    thread.start()
    try:
        yield broker.endpoint
    finally:
        stop.set()
        thread.join()
