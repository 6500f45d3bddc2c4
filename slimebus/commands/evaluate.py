"""`slimebus eval`: evaluate the newest version of a running run."""

import json
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slimebus.config.flags import ConfigCommand, config_argument, from_context
from slimebus.joining import visit
from slimebus.messages import Evaluate, EvaluateReply

if TYPE_CHECKING:
    from slimebus.transport.client import Client

WAIT_S = 10.0


@click.command("eval", cls=ConfigCommand, short_help="Evaluate the newest version on the run's workers.")
@config_argument
@click.option("--broker", help="[address] Of the broker, tcp://HOST:PORT; default: broker.bind of the config.")
@click.option("--dataset", "datasets", multiple=True, help="[name] Of eval.datasets, may be repeated; default: all.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@click.pass_context
def evaluate(ctx: click.Context, run_yaml: Path | None, broker: str | None, datasets: tuple[str, ...], as_json: bool) -> None:
    """Evaluate the newest published version on the run's own workers; training goes on meanwhile."""
    with visit(from_context(ctx, run_yaml), broker, what="eval") as client:
        results = _await_results(client, secrets.token_hex(8), list(datasets))
    if as_json:
        click.echo(json.dumps(results, indent=2))
    for row in [] if as_json else results:
        interval = f" [{row['low']:.3f}, {row['high']:.3f}]" if row.get("low") is not None else ""
        mean = "no score" if row["mean_reward"] is None else f"{row['mean_reward']:.4f}{interval}"
        why = f" ({row['reason']})" if row["reason"] else ""
        click.echo(f"{row['dataset']}: {mean} over {row['num_samples']} samples, version {row['version']}{why}")


def _await_results(client: "Client", key: str, datasets: list[str]) -> list[dict[str, Any]]:
    said = ""
    while True:
        reply = client.call(Evaluate(key=key, datasets=datasets, wait_s=WAIT_S), timeout_s=WAIT_S + 20)
        answer = reply.expect(EvaluateReply)
        if answer.done:
            found: list[dict[str, Any]] = json.loads(bytes(reply.bulk[0]))
            return found
        if answer.reason != said:
            said = answer.reason
            click.echo(said, err=True)
