"""`slimebus rollout`: one rollout worker of a node."""

from pathlib import Path

import click

from slimebus.config.flags import ConfigCommand, config_argument, from_context, take_over_option


@click.command(cls=ConfigCommand)
@config_argument
@click.option("--broker", help="[address] Of the broker, tcp://HOST:PORT; default: that of the run directory, else broker.bind.")
@click.option("--worker-name", help="[name] Of this worker; default: made from host and process id.")
@click.option(
    "--teacher", metavar="MODEL", help="[path or URL] Be the run's teacher: score its samples with this model, or running engine."
)
@take_over_option
@click.pass_context
def rollout(
    ctx: click.Context, run_yaml: Path | None, broker: str | None, worker_name: str | None, teacher: str | None, take_over: bool
) -> None:  # fmt: skip
    """Run a rollout worker: lease prompts, sample, reward, put.

    Starts its own engine (`--engine cpu|sglang`) or uses running ones (`--engine-url http://host:port`). Workers may join
    and leave at any time; Ctrl-C or SIGTERM gives leased prompts back and leaves.

    With --teacher: read the run's samples as a consumer and give each token its logprob under that model (docs/consumers.md).
    """
    resolved, debug = from_context(ctx, run_yaml), bool((ctx.obj or {}).get("debug"))
    if teacher:
        from rollout.worker.teacher import run_teacher

        return run_teacher(resolved, broker, teacher, worker_name, take_over=take_over, debug=debug)
    from rollout.worker.worker import run_worker

    run_worker(resolved, broker, worker_name, take_over=take_over, debug=debug)
