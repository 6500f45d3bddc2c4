"""`slimebus engines` and `slimebus drain`: the engines and workers of a run, changed while it goes on."""

import json
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from slimebus.bus.errors import SlimebusError
from slimebus.bus.messages import NO_VERSION, Command, CommandReply
from slimebus.client.connect import RESTART_S, connect_without_joining
from slimebus.config.flags import RunCommand, RunTarget, asks_broker, of_run
from slimebus.telemetry.formatting import align_columns

if TYPE_CHECKING:
    from slimebus.bus.transport.client import Client

POLL_S, TIMEOUT_S = 0.2, 60.0
NO_WORKER = "no_worker"
HEADS = ("worker", "engine", "model", "state", "version", "running", "")


worker_option = click.option("--worker", default="", help="[name] The worker that does it; not needed where there is only one.")


@click.group()
def engines() -> None:
    """Show, attach and detach the engines of a run while it goes on."""


@engines.command("ls", cls=RunCommand)
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
@of_run()
@asks_broker(TIMEOUT_S)
def list_(run: RunTarget, broker: str | None, timeout_s: float, as_json: bool) -> None:
    """List the engines of all workers: where they are, what they do, which version they serve."""
    from slimebus.view.run_status import ask_status

    with connect_without_joining(run.resolved, broker, what="engines", patience_s=min(timeout_s, RESTART_S)) as client:
        clients = ask_status(client, timeout_s=timeout_s)["clients"]
    found = [{"worker": client["name"], **engine} for client in clients for engine in client["engines"]]
    rows = []
    for e in found:
        version, note = "" if e["version"] == NO_VERSION else e["version"], "" if e["is_owned"] else "attached"
        rows.append((e["worker"], e["url"], e["model"] or "policy", e["state"], version, e["running"], note))
    click.echo(json.dumps(found, indent=2) if as_json else "\n".join(align_columns(rows, HEADS)))


@engines.command(cls=RunCommand)
@worker_option
@of_run("URL", 1)
@asks_broker(TIMEOUT_S)
def attach(run: RunTarget, broker: str | None, timeout_s: float, worker: str) -> None:
    """Have a worker sample on the running engine at URL too; it gets the newest weights first."""
    _command(run, "attach", broker, timeout_s, worker)


@engines.command(cls=RunCommand)
@worker_option
@of_run("URL", 1)
@asks_broker(TIMEOUT_S)
def detach(run: RunTarget, broker: str | None, timeout_s: float, worker: str) -> None:
    """Have a worker let the engine at URL go. Its samples are continued on others; a server that you started goes on."""
    _command(run, "detach", broker, timeout_s, worker)


@click.command(cls=RunCommand)
@of_run("WORKER", 1)
@asks_broker(TIMEOUT_S)
def drain(run: RunTarget, broker: str | None, timeout_s: float) -> None:
    """Have WORKER hand over the samples it has begun, and leave. `slimebus status` lists the workers."""
    _command(run, "drain", broker, timeout_s, "")


def _command(run: RunTarget, action: str, broker: str | None, timeout_s: float, worker: str) -> None:
    [word] = run.names
    worker, url = (word, "") if action == "drain" else (worker, word)
    command = Command(key=secrets.token_hex(8), action=action, worker=worker, url=url)
    with connect_without_joining(run.resolved, broker, what=action, patience_s=min(timeout_s, RESTART_S)) as client:
        reply = _outcome(lambda: client.call(command, timeout_s=timeout_s).expect(CommandReply), timeout_s)
        if action == "drain" and not reply.failed:
            _until_it_left(client, word, timeout_s)
            reply.text = "it has left"
    if reply.failed:
        raise SlimebusError(f"{reply.worker or worker or 'the worker'}: {reply.text}")
    click.echo(f"{reply.worker or worker or 'done'}: {reply.text}")


def _until_it_left(client: "Client", name: str, timeout_s: float) -> None:
    from slimebus.view.run_status import ask_status

    deadline = time.monotonic() + timeout_s
    while any((c["name"], c["role"]) == (name, "rollout") and c["state"] != "gone" for c in ask_status(client, timeout_s)["clients"]):
        if time.monotonic() > deadline:
            raise SlimebusError(f"{name} has not left within {timeout_s:g} s; it hands over what it has begun, and may leave yet")
        time.sleep(POLL_S)


def _outcome(ask: Callable[[], Any], timeout_s: float) -> CommandReply:
    """What became of a command; one to drain is done, too, when its worker has left."""
    deadline, reply = time.monotonic() + timeout_s, None
    while reply is None or not reply.done:
        try:
            last, reply = reply, ask()
            reply.worker = reply.worker or (last.worker if last else "")
        except SlimebusError as bad:
            if reply is None or bad.code != NO_WORKER:
                raise
            return CommandReply(done=True, worker=reply.worker, text="it has left")
        if not reply.done and time.monotonic() > deadline:
            raise SlimebusError(f"{reply.worker} has not done it within {timeout_s:g} s; it may do it yet")
        if not reply.done:
            time.sleep(POLL_S)
    return reply
