"""The command `python -m rollout.embedded`; torch is imported only once options are read."""

import os
import socket
import sys
from pathlib import Path
from typing import Any

import click

from slimebus.bus.errors import EXIT_FAILURE, EXIT_USAGE, SlimebusError, UsageError


@click.command()
@click.option("--model-path", required=True, type=click.Path(path_type=Path), help="Hugging Face model directory to serve.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=30000, show_default=True, type=click.IntRange(0, 65535), help="Port to listen on; 0 picks a free one.")
@click.option("--max-running-requests", default=256, show_default=True, type=click.IntRange(1), help="Sequences decoded together.")
@click.option("--max-queued-requests", default=4096, show_default=True, type=click.IntRange(0), help="Sequences that may wait; then 503.")
@click.option("--max-prefill-tokens", default=8192, show_default=True, type=click.IntRange(1), help="Prompt tokens computed in one step.")
@click.option("--kv-cache-gb", default=2.0, show_default=True, help="Most memory for keys and values, GiB.")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1), help="Torch threads.")
@click.option("--served-dtype", default="float32", show_default=True, type=click.Choice(["float32", "bfloat16"]), help="Computed type.")
@click.option("--seed", type=int, help="Seed of the sampler; without one each start differs.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def engine(debug: bool, **options: Any) -> None:
    """Serve a Hugging Face model on CPU with SGLang's native HTTP API (docs/engine-contract.md)."""
    # Before torch is imported: MKL reads it once.
    os.environ["OMP_NUM_THREADS"] = str(options["threads"])
    from rollout.embedded.model_config import EmbeddedModelConfig
    from rollout.embedded.settings import Settings

    settings = Settings(**options)
    try:
        # What is wrong is reported at once, not after the import of torch.
        EmbeddedModelConfig.read(settings.model_path)
        sock = _bind(settings.host, settings.port)
        from rollout.embedded.server import run_server

        run_server(settings, sock)
    except SlimebusError as error:
        if debug:
            raise
        click.echo(f"engine: {error.text}", err=True)
        sys.exit(EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILURE)


def _bind(host: str, port: int) -> socket.socket:
    """A bound socket, not yet listening; UsageError when the address is unavailable."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from None
    return sock


if __name__ == "__main__":
    engine()
