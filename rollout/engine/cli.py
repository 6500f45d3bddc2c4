"""The command `python -m rollout.engine`; torch is imported only once options are read."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from slimebus.errors import EXIT_FAILURE, EXIT_USAGE, SlimebusError, UsageError

WATCH_OWN_PARENT = 0


@click.command()
@click.option("--model-path", required=True, type=click.Path(path_type=Path), help="Hugging Face model directory to serve.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=30000, show_default=True, type=click.IntRange(0, 65535), help="Port to listen on; 0 picks a free one.")
@click.option("--max-running-requests", default=256, show_default=True, type=click.IntRange(1), help="Sequences decoded together.")
@click.option("--max-queued-requests", default=4096, show_default=True, type=click.IntRange(0), help="Sequences that may wait; then 503.")
@click.option("--max-prefill-tokens", default=8192, show_default=True, type=click.IntRange(1), help="Prompt tokens computed in one step.")
@click.option("--kv-cache-gb", default=2.0, show_default=True, help="Most memory for keys and values, GiB.")
@click.option("--context-length", default=0, type=click.IntRange(0), help="Most tokens of a sequence; 0: as the model's config says.")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1), help="Torch threads.")
@click.option("--served-dtype", default="float32", show_default=True, type=click.Choice(["float32", "bfloat16"]), help="Computed type.")
@click.option("--weight-version", default="default", show_default=True, help="Version name of the first weights.")
@click.option("--seed", type=int, help="Seed of the sampler; without one each start differs.")
@click.option(
    "--exit-with-parent",
    is_flag=False,
    flag_value=WATCH_OWN_PARENT,
    type=int,
    metavar="[PID]",
    help="End when the parent process ends; with its PID also when it ended before this process could look.",
)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def engine(exit_with_parent: int | None, debug: bool, **options: Any) -> None:
    """Serve a Hugging Face model on CPU with SGLang's native HTTP API (docs/engine-contract.md)."""
    parent_pid = os.getppid() if exit_with_parent == WATCH_OWN_PARENT else exit_with_parent
    # Before torch is imported: MKL reads it once.
    os.environ["OMP_NUM_THREADS"] = str(options["threads"])
    from rollout.engine.listen import bind
    from rollout.engine.model_config import ModelConfig
    from rollout.engine.settings import Settings

    settings = Settings(**options)
    try:
        # What is wrong is said at once, not after the import of torch.
        ModelConfig.read(settings.model_path)
        sock = bind(settings.host, settings.port)
        from rollout.engine.serve import run

        run(settings, sock, parent_pid)
    except SlimebusError as error:
        if debug:
            raise
        click.echo(f"engine: {error.text}", err=True)
        sys.exit(EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILURE)
