"""`slimebus view`: the page of a run."""

import contextlib
import os
import socket
from collections.abc import Collection
from pathlib import Path

import click

from slimebus.bus.errors import UsageError
from slimebus.config import Resolved
from slimebus.config.flags import RunCommand, RunTarget, of_run
from slimebus.security.exposure import check_bind

NICENESS, OOM_SCORE = 10, 500
"""Of the process that a broker starts: what it computes must not slow the run, and where memory is short it goes first."""


class ViewCommand(RunCommand):
    """It may be asked to listen beyond this machine."""

    fields: Collection[str] = (*RunCommand.fields, "security.insecure")


@click.command(cls=ViewCommand)
@of_run("[RUN_DIR]")
@click.option("--http", default="127.0.0.1:0", show_default=True, help="[address] Where the page is served; port 0 takes any free one.")
@click.option("--broker", help="[address] Of the broker, tcp://HOST:PORT; default: that of the run directory, else broker.bind.")
@click.option("--listening", type=int, hidden=True, help="[file descriptor] A socket of the broker that starts this, instead of --http.")
def view(run: RunTarget, http: str, broker: str | None, listening: int | None) -> None:
    """Show a run on a web page, while it goes on or when it is over.

    RUN_DIR is its run directory; without one, that of RUN.yaml. A broker serves the same page of its run by itself (broker.http).
    Ctrl-C ends it.
    """
    resolved = _config_of_last_run(run)
    import asyncio

    from broker.page.process import listen, token_of
    from broker.page.server import Page, serve
    from slimebus.telemetry import logs
    from slimebus.view.report import page_url

    logs.set_up("page")
    if listening is None:
        check_bind(f"tcp://{http}", "--http", has_keys=resolved.keys_path is not None, insecure=resolved.config.security.insecure)
        sock, url = listen(http)
        click.echo(f"page: {url}")
    else:
        lower_priority()
        sock, url = socket.socket(fileno=listening), page_url(resolved.run_dir)

    async def show() -> None:
        await serve(Page(resolved, broker, token_of(url)), sock)

    asyncio.run(show())


def _config_of_last_run(run: RunTarget) -> Resolved:
    """The run that is meant, with its config as it last ran; the keys that were given are those used."""
    import msgspec

    from slimebus.config.saved import saved_config

    if len(run.names) > 1:
        raise UsageError(f"view: {len(run.names)} run directories given; expected one")
    given = run.resolved
    found = saved_config(Path(run.names[0]) if run.names else given.run_dir)
    keys = msgspec.structs.replace(given.config.security, keys=str(given.keys_path.resolve()) if given.keys_path else "")
    return msgspec.structs.replace(found, config=msgspec.structs.replace(found.config, security=keys))


def lower_priority() -> None:
    """Let the run's other processes go first, of one user and of one session alike: Linux shares cores by sessions before niceness.

    Of memory too.
    """
    os.nice(NICENESS)
    with contextlib.suppress(OSError):  # a /proc that is read-only
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE))
    if os.getsid(0) == os.getpid():  # a group of its own; otherwise it would be that of the process that started this
        with contextlib.suppress(OSError):  # not every kernel groups by session
            Path("/proc/self/autogroup").write_text(str(NICENESS))
