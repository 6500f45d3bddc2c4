"""`slimebus weights`: weights as files: model directories, delta files, chains of them."""

from pathlib import Path

import click

from slimebus.bus.errors import EXIT_FAILURE, FatalWeightsError, UsageError

EXISTING = click.Path(exists=True, path_type=Path)


class WeightsCommands(click.Group):
    """A path that holds no weights, or others than are needed, is a mistake of who named it."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except FatalWeightsError as bad:
            raise UsageError(bad.text, code=bad.code) from None


@click.group(cls=WeightsCommands)
def weights() -> None:
    """Apply and verify weights as files.

    A PATH is a model directory or a .safetensors file, a .delta or .full file, or the folder of a lineage under weights.weights_dir.
    A is any of these but a .delta file; of a lineage, its newest version.
    """


@weights.command()
@click.argument("a", type=EXISTING)
@click.argument("delta", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
def apply(a: Path, delta: Path, out: Path) -> None:
    """Apply the file DELTA to the model A and write the result as the model directory OUT; every tensor is verified."""
    from slimebus.weights.files import delta_file, stored_weights
    from slimebus.weights.host.safetensors_file import write_model

    found = delta_file.read(delta)
    made = delta_file.apply(found, delta_file.base_for(found, stored_weights.read(a)))
    write_model(out, made.tensors, config_from=a if (a / "config.json").is_file() else None)
    click.echo(f"{out}: {len(made.tensors)} tensors, {made.size_bytes} bytes, digest {made.digest}")


@weights.command()
@click.argument("path", type=EXISTING)
@click.option("--digest", help="[hash] What PATH must hash to, as `verify` says it and each published version carries it.")
@click.option("--base", type=EXISTING, help="[path] The model that a .delta file starts from; without it only the file itself is checked.")
@click.pass_context
def verify(ctx: click.Context, path: Path, digest: str | None, base: Path | None) -> None:
    """Check every byte of PATH against its hashes. Exit code 1 when something is wrong."""
    from slimebus.weights.files import stored_weights

    found, problems = stored_weights.verify(path, None if base is None else stored_weights.read(base))
    if digest and digest != found:
        problems.append(f"the digest is {found or 'unknown'}, expected {digest}")
    for problem in problems:
        click.echo(problem if problem.startswith(f"{path}") else f"{path}: {problem}", err=True)
    if problems:
        ctx.exit(EXIT_FAILURE)
    click.echo(f"{path}: good, digest {found}")
