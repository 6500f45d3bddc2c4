"""`slimebus status`: what the broker knows of everyone."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slimebus.config.flags import ConfigCommand, config_argument, from_context
from slimebus.errors import Unreachable
from slimebus.joining import visit
from slimebus.messages import Status, StatusReply

if TYPE_CHECKING:
    from slimebus.transport.client import Client

EXIT_STALLED = 3
EXIT_UNREACHABLE = 4


def ask_status(client: "Client", timeout_s: float) -> dict[str, Any]:
    """The broker's status as a map (docs/protocol.md). Raises SlimebusError."""
    reply = client.call(Status(), timeout_s=timeout_s)
    reply.expect(StatusReply)
    found: dict[str, Any] = json.loads(bytes(reply.bulk[0]))
    return found


@click.command(cls=ConfigCommand)
@config_argument
@click.option("--broker", help="[address] Of the broker, tcp://HOST:PORT; default: broker.bind of the config.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
@click.option("--timeout-s", default=5.0, show_default=True, help="[seconds] How long to wait for the broker.")
@click.pass_context
def status(ctx: click.Context, run_yaml: Path | None, broker: str | None, as_json: bool, timeout_s: float) -> None:
    """Show the step, the queues, every process and who waits for whom.

    Exit code 0 while the run moves or has finished, 3 when it is stalled (the first line names the role, the process and the reason),
    4 when no broker answers.
    """
    try:
        with visit(from_context(ctx, run_yaml), broker, what="status", role="viewer") as client:
            found = ask_status(client, timeout_s)
    except Unreachable as silent:
        click.echo(f"slimebus: {silent.text}", err=True)
        sys.exit(EXIT_UNREACHABLE)
    click.echo(json.dumps(found, indent=2) if as_json else "\n".join(summary(found)))
    if found.get("stalled"):
        sys.exit(EXIT_STALLED)


def summary(found: dict[str, Any]) -> list[str]:
    """The status in lines for a person; empty parts are left out."""
    stalled = found.get("stalled")
    lines = [f"stalled for {stalled['since_s']:.0f} s (limit {stalled['limit_s']:.0f} s): {stalled['reason']}"] if stalled else []
    for key, value in found.items():
        if key == "stalled":
            continue
        if isinstance(value, dict) and value and all(not isinstance(v, dict | list) for v in value.values()):
            lines.append(f"{key:<12} " + "  ".join(f"{name} {_short(v)}" for name, v in value.items()))
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            lines.append(f"{key}:")
            lines += ["  " + "  ".join(f"{name} {_short(v)}" for name, v in row.items() if not isinstance(v, dict)) for row in value[-12:]]
        elif isinstance(value, list) and value and isinstance(value[0], str):
            lines += [f"{key:<12} {text}" for text in value]
        elif not isinstance(value, dict | list):
            lines.append(f"{key:<12} {_short(value)}")
    return lines


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
