"""`slimebus weights`: look at versions and deltas as files: model directories, delta files, chains of them."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slimebus.errors import EXIT_FAILURE, UsageError

if TYPE_CHECKING:
    from slimebus.weights.tensors import Weights

Place = click.Path(exists=True, path_type=Path)
as_json_option = click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")


class Files(click.Group):
    """Says which file cannot be read, instead of where in the code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except OSError as bad:
            raise UsageError(f"{bad.filename or 'a file'}: {bad.strerror}") from bad


@click.group(cls=Files, short_help="Compare, apply and verify weights as files.")
def weights() -> None:
    """Compare, apply and verify weights as files.

    A PATH is a model directory or a .safetensors file, a .delta or .full file, or the folder of a lineage under weights.weights_dir.
    A and B are any of these but a .delta file; of a lineage, its newest version.
    """


@weights.command("ls")
@click.argument("path", type=Place)
@as_json_option
def list_(path: Path, as_json: bool) -> None:
    """List the tensors of PATH, or the versions of a chain."""
    from slimebus.weights import listing

    _show(listing.rows_of(path), as_json, listing.line_of)


@weights.command()
@click.argument("a", type=Place)
@click.argument("b", type=Place)
@click.option("--out", type=click.Path(path_type=Path), help="[path] Write what leads from A to B into this file.")
@click.option("--bf16", is_flag=True, help="Round float32 tensors to bfloat16 first, as the trainer does when it publishes.")
@as_json_option
def diff(a: Path, b: Path, out: Path | None, bf16: bool, as_json: bool) -> None:
    """Say what changed from A to B: density, sizes of the steps, bytes by codec, layer by layer.

    Only bfloat16 and float16 tensors have steps; a changed tensor of another dtype travels whole.
    """
    from slimebus.weights import comparison, delta_file

    base, target = _read(a, bf16=bf16), _read(b, bf16=bf16)
    found = comparison.compare(base, target)
    if out is not None:
        manifest, payloads = delta_file.between(base, target)
        with _writing(out):
            found["file"] = {"path": str(out), "bytes": delta_file.write(out, manifest, payloads)}
    click.echo(json.dumps(found, indent=2) if as_json else "\n".join(comparison.lines(found)))


@weights.command()
@click.argument("a", type=Place)
@click.argument("delta", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--bf16", is_flag=True, help="Round float32 tensors of A to bfloat16 first, as the delta was made with `diff --bf16`.")
def apply(a: Path, delta: Path, out: Path, bf16: bool) -> None:
    """Apply the file DELTA to the model A and write the result as the model directory OUT; every tensor is verified."""
    from slimebus.weights import delta_file
    from slimebus.weights.safetensors_file import write_model

    made = delta_file.apply(delta_file.read(delta), _read(a, bf16=bf16))
    with _writing(out):
        write_model(out, made, config_from=a if (a / "config.json").is_file() else None)
    click.echo(f"{out}: {len(made.tensors)} tensors, {made.size_bytes} bytes, digest {made.digest}")


@weights.command()
@click.argument("path", type=Place)
@click.option("--digest", help="[hash] What PATH must hash to, as `verify` says it and each published version carries it.")
@click.option("--base", type=Place, help="[path] The model that a .delta file starts from; without it only the file itself is checked.")
@click.pass_context
def verify(ctx: click.Context, path: Path, digest: str | None, base: Path | None) -> None:
    """Check every byte of PATH against its hashes. Exit code 1 when something is wrong."""
    from slimebus.weights import listing

    found, problems = listing.verify(path, None if base is None else _read(base))
    if digest and digest != found:
        problems.append(f"the digest is {found or 'unknown'}, expected {digest}")
    for problem in problems:
        click.echo(problem if problem.startswith(f"{path}") else f"{path}: {problem}", err=True)
    if problems:
        ctx.exit(EXIT_FAILURE)
    click.echo(f"{path}: good, digest {found}")


@weights.command()
@click.argument("engine_url")
@click.argument("model_dir", type=Place, required=False)
@click.option("--trainer", multiple=True, help="[address] Of the trainer's weight server, tcp://HOST:PORT; once for each publishing rank.")
@click.option("--broker", help="[address] Of the broker, which knows the trainer's; default with --run: broker.bind of that config.")
@click.option("--run", type=Place, help="[path] A RUN.yaml, for its broker and keys.")
@click.option("--timeout-s", default=120.0, show_default=True, help="[seconds] Each for the pull and the checksums; 5 to answer at all.")
@as_json_option
@click.pass_context
def check(
    ctx: click.Context, engine_url: str, model_dir: Path | None, *, trainer: tuple[str, ...], broker: str | None, run: Path | None,
    timeout_s: float, as_json: bool,
) -> None:  # fmt: skip
    """Compare what the engine at ENGINE_URL has with the trainer's newest version, or with MODEL_DIR, tensor by tensor.

    Exit code 0 when every tensor is the same, 1 when one differs or could not be compared, which is said of each.
    """
    from slimebus.commands import weights_check

    source = weights_check.Source(model_dir, trainer, broker, run, timeout_s)
    found = weights_check.found(engine_url, source)
    click.echo(json.dumps(found, indent=2) if as_json else "\n".join(weights_check.lines(found)))
    if not found["is_same"]:
        ctx.exit(EXIT_FAILURE)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as bad:
        raise UsageError(f"{path} cannot be written: {bad.strerror}: {bad.filename or path}") from None


def _read(path: Path, *, bf16: bool = False) -> "Weights":
    from slimebus.weights import listing
    from slimebus.weights.rounding import rounded
    from slimebus.weights.safetensors_file import as_weights

    return as_weights({name: rounded(tensor) if bf16 else tensor for name, tensor in listing.read(path).items()})


def _show(rows: list[dict[str, Any]], as_json: bool, line_of: Callable[[dict[str, Any]], str]) -> None:
    click.echo(json.dumps(rows, indent=2) if as_json else "\n".join(line_of(row) for row in rows))
