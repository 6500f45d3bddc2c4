"""`slimebus weights`: look at versions and deltas as files: model directories, delta files, chains of them."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slimebus.bus.errors import EXIT_FAILURE, FatalWeightsError, UsageError
from slimebus.cli.formatting import columns

if TYPE_CHECKING:
    from slimebus.weights.tensors import Weights

EXISTING = click.Path(exists=True, path_type=Path)
as_json_option = click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")


class Group(click.Group):
    """A path that holds no weights, or others than are needed, is a mistake of who named it."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except FatalWeightsError as bad:
            raise UsageError(bad.text, code=bad.code) from None


@click.group(cls=Group)
def weights() -> None:
    """Compare, apply and verify weights as files.

    A PATH is a model directory or a .safetensors file, a .delta or .full file, or the folder of a lineage under weights.weights_dir.
    A and B are any of these but a .delta file; of a lineage, its newest version.
    """


@weights.command("ls")
@click.argument("path", type=EXISTING)
@as_json_option
def list_(path: Path, as_json: bool) -> None:
    """List the tensors of PATH, or the versions of a chain."""
    from slimebus.weights.files import listing

    rows = listing.rows_of(path)
    shown = [["x".join(map(str, cell)) if isinstance(cell, list) else cell for cell in row.values()] for row in rows]
    click.echo(json.dumps(rows, indent=2) if as_json else "\n".join(columns(shown, list(rows[0]) if rows else ())))


@weights.command()
@click.argument("a", type=EXISTING)
@click.argument("b", type=EXISTING)
@click.option("--out", type=click.Path(path_type=Path), help="[path] Write what leads from A to B into this file.")
@click.option("--exact", is_flag=True, help="Compare float32 as it is, instead of rounded to bfloat16 as the trainer publishes it.")
@as_json_option
def diff(a: Path, b: Path, out: Path | None, exact: bool, as_json: bool) -> None:
    """Say what changed from A to B: density, sizes of the steps, bytes by codec, layer by layer.

    Only bfloat16 and float16 tensors have steps; a changed tensor of another dtype travels whole.
    """
    from slimebus.weights.files import comparison, delta_file

    base, target = _read(a, exact=exact), _read(b, exact=exact)
    found = comparison.compare(base, target)
    if out is not None:
        manifest, payloads = delta_file.between(base, target)
        found["file"] = {"path": str(out), "bytes": delta_file.write(out, manifest, payloads)}
    click.echo(json.dumps(found, indent=2) if as_json else "\n".join(comparison.lines(found)))


@weights.command()
@click.argument("a", type=EXISTING)
@click.argument("delta", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
def apply(a: Path, delta: Path, out: Path) -> None:
    """Apply the file DELTA to the model A and write the result as the model directory OUT; every tensor is verified."""
    from slimebus.weights.files import delta_file, listing
    from slimebus.weights.files.safetensors_file import write_model

    found = delta_file.read(delta)
    made = delta_file.apply(found, delta_file.base_for(found, listing.read(a)))
    write_model(out, made.tensors, config_from=a if (a / "config.json").is_file() else None)
    click.echo(f"{out}: {len(made.tensors)} tensors, {made.size_bytes} bytes, digest {made.digest}")


@weights.command()
@click.argument("path", type=EXISTING)
@click.option("--digest", help="[hash] What PATH must hash to, as `verify` says it and each published version carries it.")
@click.option("--base", type=EXISTING, help="[path] The model that a .delta file starts from; without it only the file itself is checked.")
@click.pass_context
def verify(ctx: click.Context, path: Path, digest: str | None, base: Path | None) -> None:
    """Check every byte of PATH against its hashes. Exit code 1 when something is wrong."""
    from slimebus.weights.files import listing

    found, problems = listing.verify(path, None if base is None else listing.read(base))
    if digest and digest != found:
        problems.append(f"the digest is {found or 'unknown'}, expected {digest}")
    for problem in problems:
        click.echo(problem if problem.startswith(f"{path}") else f"{path}: {problem}", err=True)
    if problems:
        ctx.exit(EXIT_FAILURE)
    click.echo(f"{path}: good, digest {found}")


def _read(path: Path, *, exact: bool) -> "Weights":
    from slimebus.weights.codec.rounding import rounded
    from slimebus.weights.files import listing
    from slimebus.weights.files.safetensors_file import as_weights

    return as_weights({name: tensor if exact else rounded(tensor) for name, tensor in listing.read(path).items()})
