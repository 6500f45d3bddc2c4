"""`slimebus keys`: who may connect to the broker and the trainer of a run."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from slimebus.bus.errors import UsageError
from slimebus.security import key_folder
from slimebus.security.allow_list import Entry, read_allow_list
from slimebus.security.key_file import BROKER
from slimebus.security.roles import ROLES
from slimebus.telemetry.formatting import align_columns

HOUR_S, DAY_S = 3600.0, 86400.0


def folder_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """The --keys option of every command that changes a folder."""
    how: Any = {"type": click.Path(path_type=Path), "default": Path("keys"), "show_default": True, "envvar": "SLIMEBUS_SECURITY_KEYS"}
    text = "[path] The folder that `slimebus keys init` made."
    return click.option("--keys", "folder", callback=_existing, help=text, **how)(function)


def _existing(ctx: click.Context, param: click.Parameter, folder: Path) -> Path:
    if not folder.is_dir():
        raise UsageError(f"no folder of keys at {folder}; `slimebus keys init {folder}` makes one, --keys names another")
    return folder


@click.group()
def keys() -> None:
    """Make, list, revoke and rotate the keys of a run, on the broker's machine."""


@keys.command()
@click.argument("folder", type=click.Path(path_type=Path), default=Path("keys"))
def init(folder: Path) -> None:
    """Make the broker's key, and one key of each role that a run needs: trainer, rollout, client.

    Copy FOLDER/trainer.key to the trainer's machine and FOLDER/rollout.key to the workers', and give every process the place
    with --keys. A running broker loads changes in FOLDER within two seconds.
    """
    key_folder.init(folder)
    click.echo(f"{folder}: made the broker's key, and a key each for {', '.join(key_folder.FIRST_KEYS)}")
    click.echo(f"copy {folder}/trainer.key to the trainer's machine, {folder}/rollout.key to the workers'; nothing else leaves this one")


@keys.command()
@click.argument("name")
@click.option("--role", type=click.Choice(ROLES), required=True, help="[choice] What its holder may do.")
@click.option("--client", default="", help="[name] The only name that its holder may join under; default: any that is free.")
@click.option("--public", default="", help="[key] Allow this public key; its secret was made elsewhere, and no file is written.")
@click.option("--days", type=click.FloatRange(min=0, min_open=True), help="[days] The key ends by itself after these; default: never.")
@folder_option
def add(name: str, role: str, client: str, public: str, days: float | None, folder: Path) -> None:
    """Add a key called NAME to the allow-list. Prints the file to copy to the machine that uses it."""
    path = key_folder.add(folder, name, role, client=client, public=public, until=time.time() + days * DAY_S if days else 0.0)
    click.echo(f"{path}: copy it to the machine that uses it" if path else f"{name}: this public key is allowed as {role}")


@keys.command()
@folder_option
def ls(folder: Path) -> None:
    """List the keys: name, role, public key, and whether it is allowed."""
    rows = [(name, entry.role, entry.public, _note(entry)) for name, entry in read_allow_list(folder / key_folder.ALLOWED).clients.items()]
    click.echo("\n".join(align_columns([(BROKER, "", key_folder.broker_keys(folder)[0], ""), *rows])))


def _note(entry: Entry) -> str:
    if entry.revoked:
        return "revoked"
    if not entry.is_good(now := time.time()):
        return "has ended"
    notes = [f"only as {entry.client}"] if entry.client else []
    if entry.until:
        notes.append(f"ends in {(entry.until - now) / DAY_S:.1f} days")
    left_s = entry.previous_until - now
    if entry.previous and left_s > 0:
        notes.append(f"its older key stays valid for {left_s / HOUR_S:.1f} hours")
    return ", ".join(notes)


@keys.command()
@click.argument("name")
@folder_option
def revoke(name: str, folder: Path) -> None:
    """Revoke a key. Its connections are closed within two seconds."""
    key_folder.revoke(folder, name)
    click.echo(f"{name}: revoked")


@keys.command()
@click.argument("name")
@click.option("--grace-h", default=24.0, show_default=True, help="[hours] How long the older key stays valid; 0: it ends at once.")
@click.option("--switch", is_flag=True, help="For the broker's key: use the new one from now on.")
@folder_option
def rotate(name: str, grace_h: float, switch: bool, folder: Path) -> None:
    """Replace the key NAME by a new one. Running processes load the new file by themselves, without a restart.

    The broker's key (NAME broker) takes two steps. `rotate broker` makes the next key and writes its public part into every key file of
    the folder: copy those files to their machines. `rotate broker --switch` then makes the running broker use it.
    """
    if name != BROKER:
        if switch:
            raise click.UsageError(f"--switch is for the broker's key only, not for {name!r}")
        path = key_folder.rotate(folder, name, grace_s=grace_h * HOUR_S)
        click.echo(f"{path}: copy it to the machine that uses it; the older key stays valid for {grace_h:g} hours")
        return
    paths = key_folder.switch_broker(folder) if switch else key_folder.prepare_broker(folder)
    click.echo("the broker uses its new key from now on" if switch else "the broker's next key is made; it still uses the present one")
    click.echo(f"copy to the machines that use them: {', '.join(map(str, paths)) or 'none'}")
    if not switch:
        click.echo("then: slimebus keys rotate broker --switch")
