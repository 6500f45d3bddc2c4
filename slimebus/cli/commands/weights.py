"""`slimebus weights`: weights as files: model directories, delta files, chains of them."""

from pathlib import Path

import click

from slimebus.bus.errors import EXIT_FAILURE


@click.group()
def weights() -> None:
    """Verify weights as files."""


@weights.command()
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option("--digest", help="[hash] What PATH must hash to, as `verify` says it and each published version carries it.")
@click.pass_context
def verify(ctx: click.Context, path: Path, digest: str | None) -> None:
    """Check every byte of PATH against its hashes. Exit code 1 when something is wrong.

    PATH is a model directory or a .safetensors file, a .delta or .full file, or the folder of a lineage under weights.weights_dir.
    """
    from slimebus.weights.files import stored_weights

    found, problems = stored_weights.verify(path)
    if digest and digest != found:
        problems.append(f"the digest is {found or 'unknown'}, expected {digest}")
    for problem in problems:
        click.echo(problem if problem.startswith(f"{path}") else f"{path}: {problem}", err=True)
    if problems:
        ctx.exit(EXIT_FAILURE)
    click.echo(f"{path}: good, digest {found}")
