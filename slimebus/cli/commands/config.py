"""`slimebus config` and `slimebus init`: what a run.yaml resolves to, whether it is right, and one to start from."""

import json
import operator
from pathlib import Path

import click
import msgspec

from slimebus.bus.errors import UsageError
from slimebus.config.field_rules import evaluation_problems
from slimebus.config.file_checks import external_problems, file_problems, teacher_problems, unchecked
from slimebus.config.flags import META, ConfigCommand, config_argument, from_context, trainer_options
from slimebus.config.load import raise_all, read, without
from slimebus.config.schema import OPEN_MAPS, paths, sections
from slimebus.telemetry.formatting import align_columns

FIRST = ("data.prompt_data", "model.hf_checkpoint", "rollout.num_rollout", "rollout.rm_type", "optimizer.lr", "broker.max_staleness")
VALUES = {"data.prompt_data": "[prompts.jsonl]", "model.hf_checkpoint": "model"}


@click.group()
def config() -> None:
    """Look at the config of a run."""


@config.command(cls=ConfigCommand, external=trainer_options)
@config_argument
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: name to [value, origin].")
@click.pass_context
def show(ctx: click.Context, run_yaml: Path | None, as_json: bool) -> None:
    """Print the resolved config and where each value came from: a flag, the file's line, the environment or the default."""
    resolved = from_context(ctx, run_yaml)
    if any(name.startswith("megatron.") for name in ctx.meta.get(META, {})):  # any flag that is not slimebus's own is one of these so far
        raise_all(external_problems(resolved))
    values = {name: operator.attrgetter(name)(resolved.config) for name in [*paths(), *OPEN_MAPS] if name != "eval.datasets"}
    values |= {f"eval.datasets.{name}": dataset for name, dataset in resolved.config.eval.datasets.items()}
    rows = {name: [msgspec.to_builtins(value), resolved.origin.get(name, "default")] for name, value in values.items()}
    lines = align_columns((name, json.dumps(value), origin) for name, (value, origin) in rows.items())
    click.echo(json.dumps(rows, indent=2) if as_json else "\n".join(lines))


@config.command(cls=ConfigCommand, external=trainer_options)
@config_argument
@click.option("--teacher", metavar="MODEL", help="[path or URL] Also whether `rollout --teacher` could score the run with this model.")
@click.option("--syntax", is_flag=True, help="Look at the values alone, not at the files, hooks and packages that they name.")
@click.pass_context
def check(ctx: click.Context, run_yaml: Path | None, teacher: str | None, syntax: bool) -> None:
    """Check a run.yaml and the files, hooks and packages that it names; print `ok`, or every mistake with its place and exit with 2."""
    resolved, problems, broken = read(run_yaml, ctx.meta.get(META, {}))
    named = [*evaluation_problems(resolved.config), *([] if syntax else file_problems(resolved))]
    named += teacher_problems(resolved, teacher) if teacher else []
    raise_all([*problems, *without(broken, named)])
    for text in () if syntax else unchecked(resolved):
        click.echo(text, err=True)
    click.echo(f"ok: {run_yaml or 'defaults'}: run {resolved.config.name!r}")


@click.command()
@click.argument("path", type=click.Path(path_type=Path), default=Path("run.yaml"))
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
def init(path: Path, force: bool) -> None:
    """Write a run.yaml with every field, its unit, meaning and default; all but the first ones commented out."""
    if path.exists() and not force:
        raise UsageError(f"{path} exists; give another path, or --force to overwrite it")
    path.write_text(commented())
    click.echo(f"{path} written; set data.prompt_data and model.hf_checkpoint, then `slimebus up {path}`")


def commented() -> str:
    """The text of a run.yaml in which every field stands with its meaning."""
    lines = ["# A slimebus run. Paths are relative to this file. `slimebus config check` tells whether it is right."]
    for name, cls, docs in sections():
        lines += ["", f"# {(cls.__doc__ or '').strip()}"]
        if name:
            lines.append(f"{name}:")
        indent = "  " if name else ""
        for doc in docs:
            mark, field = "" if doc.name in FIRST else "# ", doc.name.rpartition(".")[2]
            lines += [f"{indent}# [{doc.unit}] {doc.meaning}", f"{indent}{mark}{field}: {VALUES.get(doc.name, doc.default)}"]
    return "\n".join(lines) + "\n"
