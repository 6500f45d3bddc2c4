"""`slimebus status`: what the broker knows of everyone."""

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slimebus.bus.errors import DataError, SlimebusError, Unreachable
from slimebus.bus.messages import Status, StatusReply
from slimebus.cli.config.flags import ConfigCommand, asks_broker, config_argument, from_context
from slimebus.cli.formatting import columns, count
from slimebus.client.connect import broker_address, is_listening, visit
from slimebus.view.live_panel import LivePanel, tokens_per_s
from slimebus.view.report import read_map

if TYPE_CHECKING:
    from slimebus.bus.transport.client import Client

EXIT_STALLED = 3
EXIT_UNREACHABLE = 4
LAST = "status.json"
OF_BROKER = {"run", "state", "step", "version", "steps", "clients", "waste", "waiting"}
SHOWN_ROWS = 12
WATCH_EVERY_S, PLAIN_EVERY_S = 1.0, 5.0
OF_WORKER = ("name", "state", "lag", "groups", "tokens/s", "last heard")


def ask_status(client: "Client", timeout_s: float) -> dict[str, Any]:
    """The broker's status as a map (docs/protocol.md). Raises SlimebusError."""
    reply = client.call(Status(), timeout_s=timeout_s)
    reply.expect(StatusReply)
    return dict(json.loads(bytes(reply.bulk[0])))


@click.command(cls=ConfigCommand)
@config_argument
@asks_broker(5.0)
@click.option("--json", "as_json", is_flag=True, help="Print everything that the broker knows, as one JSON object.")
@click.option(
    "--watch", is_flag=True, help="Show the run as it goes, until it is over or Ctrl-C; where there is no terminal, a line each 5 s."
)
@click.pass_context
def status(ctx: click.Context, run_yaml: Path | None, broker: str | None, as_json: bool, watch: bool, timeout_s: float) -> None:
    """Show the step, reward and lag, every worker and who waits for whom.

    Exit code 0 while the run moves or has finished, 3 when it is stalled (the first line names the role, the process and the reason),
    4 when no broker answers. Of a run whose broker has ended, the last status in its run directory is shown.
    """
    resolved = from_context(ctx, run_yaml)
    found, last = None, None if broker else last_status(resolved.run_dir)
    try:
        if last is None or is_listening(broker_address(resolved, None)):
            with visit(resolved, broker, what="status", role="viewer") as client:
                found = ask_status(client, timeout_s)
                if watch:
                    found = _watch(client, found, timeout_s, is_supervised=resolved.config.algorithm.is_supervised)
    except SlimebusError as bad:
        over = last_status(resolved.run_dir) if found else None
        if over and found and (over["run"], over["state"]) == (found["run"], "finished"):  # between two looks of --watch
            found, last = None, over
        elif isinstance(bad, Unreachable):
            click.echo(f"slimebus: {bad.text}", err=True)
            sys.exit(EXIT_UNREACHABLE)
        elif bad.code != "wrong_run" or last is None:
            raise
        else:
            click.echo(f"slimebus: {bad.text}", err=True)
    shown = found or last or {}
    is_over = shown.get("state") == "finished"
    what = "the run is over" if is_over else "no broker runs; started again with the same run directory it goes on"
    lines = [] if found else [f"{what}. Its last status ({resolved.run_dir / LAST}):"]
    if as_json:
        click.echo(json.dumps(shown, indent=2))
    else:
        click.echo("\n".join([*lines, *brief(shown, is_supervised=resolved.config.algorithm.is_supervised)]))
    if not found and not is_over:
        sys.exit(EXIT_UNREACHABLE)
    if found and found.get("stalled"):
        sys.exit(EXIT_STALLED)


def last_status(run_dir: Path) -> dict[str, Any] | None:
    """What the broker of the run wrote when it ended; None when there is no such file, or another's."""
    found: dict[str, Any] = {}
    with contextlib.suppress(OSError, DataError):
        found = read_map(run_dir / LAST)
    return found if found.keys() >= OF_BROKER else None


def _watch(client: "Client", found: dict[str, Any], timeout_s: float, *, is_supervised: bool) -> dict[str, Any]:
    """Show the run until it is over; the last status."""
    from rich.console import Console
    from rich.live import Live

    panel, console = LivePanel(str(found["run"]), is_supervised=is_supervised), Console(highlight=False)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            panel.take(found)
            if console.is_terminal:
                live.update(panel.render(), refresh=True)
            else:
                console.print(panel.line(), soft_wrap=True, markup=False)
            if found["state"] == "finished":
                return found
            time.sleep(WATCH_EVERY_S if console.is_terminal else PLAIN_EVERY_S)
            found = ask_status(client, timeout_s)


def brief(found: dict[str, Any], *, is_supervised: bool = False) -> list[str]:
    """The status in lines that a person reads in five seconds: what the run does, the workers, who waits, what went wrong."""
    panel = LivePanel("", is_supervised=is_supervised)
    panel.take(found)
    texts = panel.texts() | {"waiting": ""} | _troubles(found)
    if found["state"] == "finished":
        del texts["groups"]  # none is on its way any more
    lines = [*_headline(found), *(f"  {label:<10} {text}" for label, text in texts.items() if text)]
    workers = [client_row(c, found["version"]) for c in found["clients"] if c["role"] == "rollout"]
    if workers:
        lines += [f"  {line}" for line in columns([[text_of(row[name]) for name in OF_WORKER] for row in workers[:SHOWN_ROWS]], OF_WORKER)]
    hidden = len(workers) - SHOWN_ROWS
    return [*lines, *([f"  and {hidden} more workers (--json)"] if hidden > 0 else []), *(f"  {sentence}" for sentence in found["waiting"])]


def client_row(client: dict[str, Any], newest: int) -> dict[str, Any]:
    """What is shown of one process. newest: the run's version."""
    version, metrics = client["version"] if (client["version"] or 0) >= 0 else None, client["metrics"]
    return {
        "name": client["name"],
        "role": client["role"],
        "state": client["state"],
        "version": version,
        "lag": None if version is None else newest - version,
        "groups": client["leases"],
        "tokens/s": count(tokens_per_s(metrics)) if "serving_s" in metrics else None,
        "last heard": f"{client['silent_s']:.0f} s ago",
    }


def _troubles(found: dict[str, Any]) -> dict[str, str]:
    """What somebody should know of that is not as it should be; label -> text, empty when there is nothing."""
    waste = (f"{one['groups']} groups {reason} ({count(one['tokens'])} tokens)" for reason, one in found["waste"].items() if one["groups"])
    counted = found.get("counted", {})
    ended = [row for row in found.get("evaluations", [])[-1:] if row["done"] and row["reason"]]
    failed, dead, skipped = counted.get("samples failed"), found["groups"].get("dead"), found.get("skipped_prompts")
    return {
        "waste": ", ".join(waste),
        "failed": f"{failed} of {counted.get('samples put', 0)} samples had no reward; the logs of workers say why" if failed else "",
        "evaluation": "".join(f"of version {row['version']} ended early: {row['reason']}" for row in ended),
        "dead": f"{dead} groups (slimebus buffer ls --state dead)" if dead else "",
        "skipped": f"{skipped} bad prompts" if skipped else "",
        "security": found.get("security", {}).get("problem") or "",
    }


def _headline(found: dict[str, Any]) -> list[str]:
    stalled, steps = found.get("stalled"), found.get("num_steps") or "?"
    lines = [f"stalled for {stalled['since_s']:.0f} s (limit {stalled['limit_s']:.0f} s): {stalled['reason']}"] if stalled else []
    of_version = f", version {found['version']}" if found.get("version", -1) >= 0 else ""
    return [*lines, f"run {found.get('run')}: {found.get('state')}, step {found.get('step')} of {steps}{of_version}"]


def text_of(value: Any) -> str:
    """A value of the status in few characters."""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return "-" if value in (None, "") else str(value)
