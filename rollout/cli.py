"""`slimebus rollout`: one worker of a node. `slimebus try`, `slimebus sample` and `slimebus check-hooks`: its path without a run."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slimebus.bus.errors import EXIT_FAILURE, UsageError
from slimebus.config import Resolved
from slimebus.config.file_checks import worker_problems
from slimebus.config.flags import ConfigCommand, config_argument, from_context, split_words, take_over_option
from slimebus.config.load import raise_all
from slimebus.telemetry import logs


@click.command(cls=ConfigCommand)
@config_argument
@click.option("--broker", help="[address] Of the broker, tcp://HOST:PORT; default: that of the run directory, else broker.bind.")
@click.option("--worker-name", help="[name] Of this worker; default: made from host and process id.")
@click.option(
    "--teacher", metavar="MODEL", help="[path or URL] Be the run's teacher: score its samples with this model, or running engine."
)
@take_over_option
@click.pass_context
def rollout(
    ctx: click.Context, run_yaml: Path | None, broker: str | None, worker_name: str | None, teacher: str | None, take_over: bool
) -> None:  # fmt: skip
    """Run a rollout worker: lease prompts, sample, reward, put.

    Starts its own engine (`--engine cpu|sglang`) or uses running ones (`--engine-url http://host:port`). Workers may join
    and leave at any time; Ctrl-C or SIGTERM gives leased prompts back and leaves.

    With --teacher: read the run's samples as a consumer and give each token its logprob under that model (docs/consumers.md).
    """
    resolved, debug = from_context(ctx, run_yaml), bool((ctx.obj or {}).get("debug"))
    if teacher:
        from rollout.worker.teacher import run_teacher

        return run_teacher(resolved, broker, teacher, worker_name, take_over=take_over, debug=debug)
    from rollout.worker.worker import run_worker

    run_worker(resolved, broker, worker_name, take_over=take_over, debug=debug)


if TYPE_CHECKING:
    from slimebus.bus.samples import Sample

COLOURS = ((-0.1, "green"), (-1.0, "yellow"), (-3.0, "dark_orange"))
"""Of a token by its logprob: above the first one it was nearly certain; below the last it is red."""


@click.command("try", cls=ConfigCommand)
@click.argument("words", nargs=-1, required=True, metavar="[RUN.yaml] PROMPT")
@click.option("--label", default="", help="[text] What the reward compares with.")
@click.option("--samples", type=click.IntRange(min=1), default=1, show_default=True, help="[samples] Of the prompt.")
@click.option("--json", "as_json", is_flag=True, help="Print the samples as JSON.")
@click.pass_context
def try_(ctx: click.Context, words: tuple[str, ...], label: str, samples: int, as_json: bool) -> None:
    """Send one PROMPT through the whole path of a worker, and print each token with mask and logprob, then the reward.

    PROMPT is text, or a JSON list of chat messages. The engine is started here, or that of --engine-url; no broker is needed.
    """
    file, rest = split_words(words)
    if len(rest) != 1:
        raise UsageError(f"got {len(rest)} prompts; expected one, in quotes")
    resolved = _checked(ctx, file)
    from rollout.local import sample_prompt

    made, texts = sample_prompt(resolved, {"prompt": _prompt(rest[0]), "label": label, "metadata": {}}, samples)
    rows = [_row(sample, text) for sample, text in zip(made, texts, strict=True)]
    if as_json:
        click.echo(json.dumps(rows))
    else:
        for number, row in enumerate(rows, 1):
            _show(row, f"sample {number} of {len(rows)}")


def _checked(ctx: click.Context, file: Path | None) -> Resolved:
    """The config, with what a worker needs; from now on waits are logged on stderr."""
    resolved = from_context(ctx, file)
    raise_all(worker_problems(resolved))
    logs.set_up("rollout")
    return resolved


def _prompt(text: str) -> Any:
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return found if isinstance(found, list) else text


def _row(sample: "Sample", texts: list[str]) -> dict[str, Any]:
    versions = [version for version, length in sample.versions for _ in range(length)]
    columns = zip(sample.tokens.tolist(), texts, sample.loss_mask.tolist(), sample.rollout_logprobs.tolist(), versions, strict=True)
    names = ("id", "text", "mask", "logprob", "version")
    about = {"reward": sample.reward, "status": sample.status, "turn": sample.turn, "metadata": sample.metadata}
    return {**about, "tokens": [dict(zip(names, values, strict=True)) for values in columns]}


def _show(row: dict[str, Any], title: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table, whole = Table("token", "id", "mask", "logprob", box=None, pad_edge=False), Text()
    for token in row["tokens"]:
        colour = next((colour for least, colour in COLOURS if token["logprob"] >= least), "red") if token["mask"] else "dim"
        whole.append(token["text"], style=colour)
        cells = (repr(token["text"]), str(token["id"]), str(token["mask"]), f"{token['logprob']:.4f}")
        table.add_row(*(Text(cell, style=colour) for cell in cells))
    about = ", ".join([f"reward {row['reward']}", row["status"], *(f"{key} {value}" for key, value in row["metadata"].items())])
    console = Console(highlight=False)
    console.rule(title)
    console.print(table, whole, Text(about, style="bold"), sep="\n", soft_wrap=True)


@click.command("sample", cls=ConfigCommand)
@config_argument
@click.option("--groups", type=click.IntRange(min=1), default=32, show_default=True, help="[groups] Of the first so many prompts.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The folder to write; it must be new or empty.")
@click.pass_context
def sample(ctx: click.Context, run_yaml: Path | None, groups: int, out: Path) -> None:
    """Sample and reward the first prompts of RUN.yaml without trainer and broker, and write the groups as `buffer export` does.

    The engine is started here with the initial model, or that of --engine-url. `slimebus trainer RUN.yaml --replay FOLDER` trains on them.
    """
    resolved = _checked(ctx, run_yaml)
    from rollout.local import sample_prompts

    made = sample_prompts(resolved, groups, out)
    if made.num_prompts < groups:
        click.echo(f"data.prompt_data has {made.num_prompts} prompts; --groups {groups} asks for more", err=True)
    if made.is_interrupted:
        click.echo(f"interrupted: {made.num_prompts - len(made.groups) - len(made.left_out)} prompts are not sampled", err=True)
    for group, why in made.left_out.items():
        click.echo(f"{group} is left out: {why}", err=True)
    samples = [one for group in made.groups.values() for one in group]
    rewards = [one.reward for one in samples if one.reward is not None]
    mean = f", mean reward {sum(rewards) / len(rewards):.3f}" if rewards else ""
    click.echo(f"{out}: {len(made.groups)} groups, {len(samples)} samples{mean}; {len(made.left_out)} groups left out")
    if made.is_interrupted or not made.groups:
        ctx.exit(EXIT_FAILURE)


@click.command("check-hooks", cls=ConfigCommand)
@config_argument
@click.pass_context
def check_hooks(ctx: click.Context, run_yaml: Path | None) -> None:
    """Run generate hook, reward and filter of RUN.yaml, and the reward of each evaluation, on the first prompt of its file.

    Nothing is started: an engine is stood in for by one that answers with the label, so what hooks do with other replies (a call of a
    tool, a wrong answer) is not reached. Exit code 1 when one of them fails.
    """
    resolved = from_context(ctx, run_yaml)
    raise_all(worker_problems(resolved))
    from rollout.local import check_hooks as check

    found = check(resolved)
    for what, gave, wrong in found:
        click.echo(f"{what}: {wrong}" if wrong else f"{what}: {gave}", err=bool(wrong))
    click.echo("not reached: what hooks do with any reply but the label; `slimebus try RUN.yaml PROMPT` asks an engine")
    if any(wrong for _, _, wrong in found):
        ctx.exit(EXIT_FAILURE)
