"""`slimebus broker`: the broker of a run."""

from pathlib import Path

import click

from slimebus.config.flags import ConfigCommand, accept_changes_option, config_argument, from_context


@click.command(cls=ConfigCommand)
@config_argument
@accept_changes_option
@click.pass_context
def broker(ctx: click.Context, run_yaml: Path | None, accept_changes: bool) -> None:
    """Run the broker: prompts, leases, the sample buffer, admission by staleness, batches, and their durable record.

    Its state is under RUN_DIR/broker; restarted with the same run directory, it resumes.
    """
    resolved = from_context(ctx, run_yaml)
    from broker.main import run_broker

    run_broker(resolved, debug=bool((ctx.obj or {}).get("debug")), accepts_changes=accept_changes)
