"""`slimebus eval`: evaluate the newest version of a running run."""

import json
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slimebus.bus.errors import SlimebusError, Unreachable
from slimebus.bus.messages import Evaluate, EvaluateReply
from slimebus.cli.config.flags import ConfigCommand, config_argument, from_context
from slimebus.client.connect import RESTART_S, visit

if TYPE_CHECKING:
    from slimebus.bus.transport.client import Client

WAIT_S = 10.0


@click.command("eval", cls=ConfigCommand, short_help="Evaluate the newest version on the run's workers.")
@config_argument
@click.option("--broker", help="[address] Of the broker, tcp://HOST:PORT; default: broker.bind of the config.")
@click.option("--dataset", "datasets", multiple=True, help="[name] Of eval.datasets, may be repeated; default: all.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@click.pass_context
def evaluate(ctx: click.Context, run_yaml: Path | None, broker: str | None, datasets: tuple[str, ...], as_json: bool) -> None:
    """Evaluate the newest published version on the run's own workers; training goes on meanwhile."""
    request, said = Evaluate(key=secrets.token_hex(8), datasets=list(datasets), wait_s=WAIT_S), ""
    with visit(from_context(ctx, run_yaml), broker, what="eval", patience_s=RESTART_S) as client:
        while isinstance(results := _ask(client, request), str):
            if results != said:
                said = results
                click.echo(said, err=True)
    click.echo(json.dumps(results, indent=2) if as_json else "\n".join(map(_sentence, results)))


def _ask(client: "Client", request: Evaluate) -> list[dict[str, Any]] | str:
    """The results, or why there are none yet."""
    try:
        reply = client.call(request, timeout_s=WAIT_S + 20)
    except SlimebusError as not_yet:
        if not not_yet.retryable or isinstance(not_yet, Unreachable):
            raise
        return not_yet.text
    answer = reply.expect(EvaluateReply)
    return list(json.loads(bytes(reply.bulk[0]))) if answer.done else answer.reason


def _sentence(row: dict[str, Any]) -> str:
    interval = f" [{row['low']:.3f}, {row['high']:.3f}]" if row.get("low") is not None else ""
    mean = "no score" if row["mean_reward"] is None else f"{row['mean_reward']:.4f}{interval}"
    why = f" ({row['reason']})" if row["reason"] else ""
    return f"{row['dataset']}: {mean} over {row['num_samples']} samples, version {row['version']}{why}"
