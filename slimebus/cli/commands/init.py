"""`slimebus init`: a commented run.yaml to start from."""

from pathlib import Path

import click

from slimebus.bus.errors import UsageError
from slimebus.config.fields import sections

FIRST = ("data.prompt_data", "model.hf_checkpoint", "rollout.num_rollout", "rollout.rm_type", "optimizer.lr", "broker.max_staleness")
VALUES = {"data.prompt_data": "[prompts.jsonl]", "model.hf_checkpoint": "model"}


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
