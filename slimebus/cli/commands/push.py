"""`slimebus push`: prompts into a running run, from files or a pipe."""

import json
import secrets
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import click
import msgspec
import xxhash

from slimebus.bus.errors import DataError, SlimebusError, UsageError
from slimebus.bus.prompt_record import BYTE_ORDER_MARK, LineReader, PromptKeys
from slimebus.cli.config.flags import ConfigCommand, Target, asks_broker, of_run
from slimebus.cli.config.schema import DataConfig
from slimebus.client.connect import broker_address
from slimebus.client.prompts import PromptClient, Pushed, batches_of, in_all

PIECE_BYTES = 1 << 20
SHOWN_LINES = 20


@click.command(cls=ConfigCommand, short_help="Push prompts into a run while it goes on.")
@of_run("FILE...")
@asks_broker(60.0)
@click.option("--front", is_flag=True, help="Before the prompts that were pushed without it.")
@click.option("--key", default="", help="[name] A push of the same key and prompts adds nothing; default: made from a file's content.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each file.")
def push(run: Target, broker: str | None, front: bool, key: str, as_json: bool, timeout_s: float) -> None:
    """Push the prompts of jsonl files into a run while it goes on; `-` reads lines from a pipe as they come.

    A file is checked whole before anything of it is pushed. They are sampled before the prompts of the run's own files.
    """
    if not run.names:
        raise UsageError("push: no file given; name jsonl files of prompts, or - for a pipe")
    address, keys, data = broker_address(run.resolved, broker), run.resolved.keys_path or "", run.resolved.config.data
    with PromptClient(address, timeout_s=timeout_s, keys=keys, run=run.resolved.expected_run) as client:
        for number, file in enumerate(run.names):
            push_one = _push_pipe if file == "-" else _push_file
            done = push_one(client, data, file, f"{key}/{number}" if key else "", front)
            click.echo(json.dumps({"file": file, **msgspec.structs.asdict(done)}) if as_json else _sentence(file, done))


class Lines:
    """Turns lines into records, and keeps what is wrong with the malformed ones, with file and line."""

    def __init__(self, name: str, data: DataConfig) -> None:
        self.name, self.skips_bad = name, data.skip_bad_prompts
        self.reader = LineReader(PromptKeys(prompt=data.input_key, label=data.label_key, metadata=data.metadata_key, tools=data.tool_key))
        self.problems: list[str] = []
        self._number = 0

    def records(self, lines: Iterable[bytes]) -> Iterator[bytes]:
        """The records of the next lines; blank and malformed ones have none."""
        for line in lines:
            self._number += 1
            try:
                text = line.removeprefix(BYTE_ORDER_MARK) if self._number == 1 else line
                record = self.reader.record(text) if text.strip() else None
            except DataError as bad:
                self.problems.append(f"{self.name}:{self._number}: {bad.text}")
                continue
            if record is not None:
                yield record

    def check(self) -> None:
        """Raise DataError that names the malformed lines, or where they are skipped print them."""
        more = len(self.problems) - SHOWN_LINES
        shown = [*self.problems[:SHOWN_LINES], *([f"{self.name}: {more} more malformed lines"] if more > 0 else [])]
        if shown and not self.skips_bad:
            raise DataError("\n  ".join(shown))
        for problem in shown:
            click.echo(f"skipped {problem}", err=True)


def _push_file(client: PromptClient, data: DataConfig, file: str, key: str, front: bool) -> Pushed:
    with Path(file).open("rb") as content:
        checked, digest = Lines(file, data), xxhash.xxh3_128()
        for record in checked.records(content):
            digest.update(record)
        checked.check()
        content.seek(0)
        batches = batches_of(Lines(file, data).records(content))
        return _push_batches(client, batches, key or digest.hexdigest(), front, "; the same command goes on behind them")


def _push_pipe(client: PromptClient, data: DataConfig, file: str, key: str, front: bool) -> Pushed:
    """Lines are pushed as they come; with a key, in batches that depend on nothing but the lines."""
    lines = Lines("stdin", data)
    pieces: Iterable[Iterable[bytes]] = [sys.stdin.buffer] if key else _pieces(sys.stdin.buffer)
    batches = (batch for piece in pieces for batch in batches_of(lines.records(piece)))
    done = _push_batches(client, batches, key or secrets.token_hex(8), front, "; the same command goes on behind them" if key else "")
    try:
        lines.check()
    except DataError:
        click.echo(f"{done.accepted} prompts were pushed", err=True)
        raise
    return done


def _pieces(pipe: BinaryIO) -> Iterator[list[bytes]]:
    """Whole lines, as many at once as the pipe has."""
    rest = b""
    while piece := pipe.read1(PIECE_BYTES):  # type: ignore[attr-defined]
        *whole, rest = (rest + piece).split(b"\n")
        yield whole
    yield [rest]


def _push_batches(client: PromptClient, batches: Iterable[list[bytes]], key: str, front: bool, remedy: str) -> Pushed:
    done: list[Pushed] = []
    try:
        for number, batch in enumerate(batches):
            done.append(client.push_batch(batch, key=f"{key}/{number}", front=front))
    except SlimebusError:
        if accepted := in_all(done).accepted:
            click.echo(f"{accepted} prompts were pushed{remedy}", err=True)
        raise
    return in_all(done)


def _sentence(file: str, done: Pushed) -> str:
    if not done.ids:
        return f"{file}: no prompts"
    again = " (pushed before; another --key pushes them again)" if done.duplicate else ""
    span = f"{done.ids[0]} to {done.ids[-1]}"
    return f"{file}: {done.accepted} accepted, {done.duplicate} duplicate{again}: {span}; {done.waiting} wait to be sampled"
