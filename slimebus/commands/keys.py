"""`slimebus keys`: who may connect to the broker and the trainer of a run."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from slimebus.security import key_folder
from slimebus.security.allow_list import Entry, read_allow_list
from slimebus.security.key_file import BROKER
from slimebus.security.roles import ROLES

HOUR_S = 3600.0


def folder_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """The --keys option of every command that changes a folder."""
    return click.option(
        "--keys",
        "folder",
        type=click.Path(path_type=Path),
        default=Path("keys"),
        show_default=True,
        envvar="SLIMEBUS_SECURITY_KEYS",
        help="[path] The folder that `slimebus keys init` made.",
    )(function)


@click.group()
def keys() -> None:
    """Make, list, revoke and rotate the keys of a run, on the broker's machine."""


@keys.command()
@click.argument("folder", type=click.Path(path_type=Path), default=Path("keys"))
def init(folder: Path) -> None:
    """Make the broker's key, and one key of each role that a run needs: trainer, rollout, client.

    Copy FOLDER/trainer.key to the trainer's machine and FOLDER/rollout.key to the workers', and give every process the place
    with --keys. A running broker takes up whatever changes in FOLDER within two seconds.
    """
    key_folder.init(folder)
    click.echo(f"{folder}: made the broker's key, and a key each for {', '.join(key_folder.FIRST_KEYS)}")
    click.echo(f"copy {folder}/trainer.key to the trainer's machine, {folder}/rollout.key to the workers'; nothing else leaves this one")


@keys.command()
@click.argument("name")
@click.option("--role", type=click.Choice(ROLES), required=True, help="[choice] What its holder may do.")
@click.option("--client", default="", help="[name] The only name that its holder may join under; default: any that is free.")
@click.option("--public", default="", help="[key] Let in this public key, whose secret was made elsewhere; no file is written.")
@folder_option
def add(name: str, role: str, client: str, public: str, folder: Path) -> None:
    """Let a new key in, called NAME. Prints the file to copy to the machine that uses it."""
    path = key_folder.add(folder, name, role, client=client, public=public)
    click.echo(f"{path}: copy it to the machine that uses it" if path else f"{name}: this public key is let in as {role}")


@keys.command()
@folder_option
def ls(folder: Path) -> None:
    """List the keys: name, role, public key, and whether it is let in."""
    click.echo(f"{BROKER:<20} {'':<9} {key_folder.broker_keys(folder)[0]}")
    for name, entry in read_allow_list(folder / key_folder.ALLOWED).clients.items():
        click.echo(f"{name:<20} {entry.role:<9} {entry.public}{_note(entry)}")


def _note(entry: Entry) -> str:
    if entry.revoked:
        return "  revoked"
    notes = [f"only as {entry.client}"] if entry.client else []
    left_s = entry.previous_until - time.time()
    if entry.previous and left_s > 0:
        notes.append(f"its older key is let in for {left_s / HOUR_S:.1f} hours more")
    return f"  {', '.join(notes)}" if notes else ""


@keys.command()
@click.argument("name")
@folder_option
def revoke(name: str, folder: Path) -> None:
    """Let a key in no more. Who is connected with it is cut off within two seconds."""
    key_folder.revoke(folder, name)
    click.echo(f"{name}: revoked")


@keys.command()
@click.argument("name")
@click.option("--grace-h", default=24.0, show_default=True, help="[hours] How long the older key is still let in; 0: not at all.")
@click.option("--switch", is_flag=True, help="For the broker's key: use the new one from now on.")
@folder_option
def rotate(name: str, grace_h: float, switch: bool, folder: Path) -> None:
    """Replace the key NAME by a new one. Processes that run take the new file up by themselves, without a restart.

    The broker's key (NAME broker) takes two steps. `rotate broker` makes the next key and writes its public part into every key file of
    the folder: copy those files out at leisure. `rotate broker --switch` then makes the running broker use it.
    """
    if name != BROKER:
        if switch:
            raise click.UsageError(f"--switch is for the broker's key only, not for {name!r}")
        path = key_folder.rotate(folder, name, grace_s=grace_h * HOUR_S)
        click.echo(f"{path}: copy it to the machine that uses it; the older key is let in for {grace_h:g} hours more")
        return
    paths = key_folder.switch_broker(folder) if switch else key_folder.prepare_broker(folder)
    click.echo("the broker uses its new key from now on" if switch else "the broker's next key is made; it still uses the present one")
    click.echo(f"copy to the machines that use them: {', '.join(map(str, paths)) or 'none'}")
    if not switch:
        click.echo("then: slimebus keys rotate broker --switch")
