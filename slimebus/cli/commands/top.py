"""`slimebus top`: the run in a terminal, with keys."""

from pathlib import Path

import click

from slimebus.cli.commands.status import ask_status
from slimebus.cli.config.flags import ConfigCommand, config_argument, from_context
from slimebus.client.connect import visit

TIMEOUT_S = 5.0


@click.command(cls=ConfigCommand)
@config_argument
@click.option("--broker", help="[address] Of the broker, tcp://HOST:PORT; default: broker.bind of the config.")
@click.pass_context
def top(ctx: click.Context, run_yaml: Path | None, broker: str | None) -> None:
    """Show the run in this terminal: its progress, workers, steps, evaluations and what was wasted.

    The left and right keys go from table to table, Tab goes into one, q leaves. It goes on when the broker is started again.
    """
    from slimebus.view.top import Top

    resolved = from_context(ctx, run_yaml)
    with visit(resolved, broker, what="top", role="viewer") as client:
        Top(lambda: ask_status(client, TIMEOUT_S), is_supervised=resolved.config.algorithm.is_supervised).run()
