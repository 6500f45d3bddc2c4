"""`slimebus push`: prompts into a running run, from files."""

import json
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
import xxhash

from slimebus.bus.errors import DataError, SlimebusError, UsageError
from slimebus.client.connect import broker_address
from slimebus.client.prompts import PromptClient, Pushed, batches_of, sum_pushes
from slimebus.config import Resolved
from slimebus.config.flags import ConfigCommand, RunTarget, asks_broker, of_run
from slimebus.prompts.prompt_record import BYTE_ORDER_MARK, LineReader

SHOWN_LINES = 20


@click.command(cls=ConfigCommand)
@of_run("FILE...")
@asks_broker(60.0)
@click.option("--front", is_flag=True, help="Before the prompts that were pushed without it.")
@click.option("--key", default="", help="[name] A push of the same key and prompts adds nothing; default: made from a file's content.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each file.")
def push(run: RunTarget, broker: str | None, front: bool, key: str, as_json: bool, timeout_s: float) -> None:
    """Push the prompts of jsonl files into a run while it goes on.

    A file is checked whole before anything of it is pushed. They are sampled before the prompts of the run's own files.
    """
    if not run.names:
        raise UsageError("push: no file given; name jsonl files of prompts")
    address, keys = broker_address(run.resolved, broker), run.resolved.keys_path or ""
    with PromptClient(address, timeout_s=timeout_s, keys=keys, run=run.resolved.expected_run) as client:
        for number, file in enumerate(run.names):
            done = _push_file(client, run.resolved, Path(file), f"{key}/{number}" if key else "", front)
            click.echo(json.dumps({"file": file, **msgspec.structs.asdict(done)}) if as_json else _sentence(file, done))


def _push_file(client: PromptClient, resolved: Resolved, file: Path, key: str, front: bool) -> Pushed:
    if file.exists() and not file.is_file():
        raise UsageError(f"push: {file} is no file that can be read twice; slimebus.client.prompts takes prompts as they come")
    digest, done = _checked(file, resolved), list[Pushed]()
    try:
        for number, batch in enumerate(batches_of(records_of(file, resolved, []))):
            done.append(client.push_batch(batch, key=f"{key or digest}/{number}", front=front))
    except SlimebusError:
        if accepted := sum_pushes(done).accepted:
            click.echo(f"{accepted} prompts were pushed; the same command goes on behind them", err=True)
        raise
    return sum_pushes(done)


def _checked(file: Path, resolved: Resolved) -> str:
    """A hash of the file's records. Raises DataError that names the malformed lines, or where they are skipped prints them."""
    problems, digest = list[str](), xxhash.xxh3_128()
    for record in records_of(file, resolved, problems):
        digest.update(record)
    more = len(problems) - SHOWN_LINES
    shown = [*problems[:SHOWN_LINES], *([f"{file}: {more} more malformed lines"] if more > 0 else [])]
    if shown and not resolved.config.data.skip_bad_prompts:
        raise DataError("\n  ".join(shown))
    for problem in shown:
        click.echo(f"skipped {problem}", err=True)
    return digest.hexdigest()


def records_of(file: Path, resolved: Resolved, problems: list[str]) -> Iterator[bytes]:
    """The records of a file's lines; blank and malformed ones have none. What is wrong with these is added to `problems`."""
    reader = LineReader(resolved.prompt_keys)
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                text = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
                record = reader.record(text) if text.strip() else None
            except DataError as bad:
                problems.append(f"{file}:{number}: {bad.text}")
                continue
            if record is not None:
                yield record


def _sentence(file: str, done: Pushed) -> str:
    if not done.ids:
        return f"{file}: no prompts"
    again = " (pushed before; another --key pushes them again)" if done.duplicate else ""
    span = f"{done.ids[0]} to {done.ids[-1]}"
    return f"{file}: {done.accepted} accepted, {done.duplicate} duplicate{again}: {span}; {done.waiting} wait to be sampled"
