"""`slimebus rollout`: one rollout worker of a node."""

from pathlib import Path

import click

from slimebus.cli.config.flags import ConfigCommand, config_argument, from_context


@click.command(cls=ConfigCommand, short_help="Run a rollout worker.")
@config_argument
@click.option("--broker", help="[address] Of the broker, tcp://HOST:PORT; default: broker.bind of the config.")
@click.option("--worker-name", help="[name] Of this worker; default: made from host and process id.")
@click.pass_context
def rollout(ctx: click.Context, run_yaml: Path | None, broker: str | None, worker_name: str | None) -> None:
    """Run a rollout worker: lease prompts, sample, reward, put.

    Starts its own engine (`--engine cpu|sglang`) or uses running ones (`--engine-url http://host:port`). Workers may join
    and leave at any time; Ctrl-C or SIGTERM gives leased prompts back and leaves.
    """
    resolved = from_context(ctx, run_yaml)
    from rollout.process import run_worker

    run_worker(resolved, broker, worker_name, debug=bool((ctx.obj or {}).get("debug")))
