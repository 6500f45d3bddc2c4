"""`slimebus config`: what a run.yaml resolves to, and whether it is right."""

import json
from pathlib import Path
from typing import Any

import click
import msgspec

from slimebus.config.check import check_evaluations
from slimebus.config.flags import ConfigCommand, config_argument, from_context
from slimebus.config.schema import OPEN_MAPS, paths


@click.group()
def config() -> None:
    """Look at the config of a run."""


@config.command(cls=ConfigCommand)
@config_argument
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: name to [value, origin].")
@click.pass_context
def show(ctx: click.Context, run_yaml: Path | None, as_json: bool) -> None:
    """Print the resolved config and where each value came from: a flag, the file's line, the environment or the default."""
    resolved = from_context(ctx, run_yaml)
    tree = msgspec.to_builtins(resolved.config)
    rows = {name: [_at(tree, name), resolved.origin.get(name, "default")] for name in [*paths(), *OPEN_MAPS] if name != "eval.datasets"}
    for name, dataset in tree["eval"]["datasets"].items():
        rows[f"eval.datasets.{name}"] = [dataset, resolved.origin.get(f"eval.datasets.{name}", "default")]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    width = max(map(len, rows))
    for name, (value, origin) in rows.items():
        click.echo(f"{name:<{width}}  {json.dumps(value):<28}  {click.style(origin, dim=origin == 'default')}")


def _at(tree: Any, name: str) -> Any:
    for key in name.split("."):
        tree = tree[key]
    return tree


@config.command(cls=ConfigCommand)
@config_argument
@click.pass_context
def check(ctx: click.Context, run_yaml: Path | None) -> None:
    """Check a run.yaml; print `ok`, or the first mistake with its place and exit with 2."""
    resolved = from_context(ctx, run_yaml)
    check_evaluations(resolved.config)
    click.echo(f"ok: {run_yaml or 'defaults'}: run {resolved.config.name!r}, {len(resolved.origin)} values set")
