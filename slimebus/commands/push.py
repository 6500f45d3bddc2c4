"""`slimebus push`: prompts into a running run, from files or a pipe."""

import json
import queue
import secrets
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import click
import msgspec
import xxhash

from slimebus.config.flags import ConfigCommand, from_context, split_words
from slimebus.config.load import Resolved
from slimebus.errors import DataError, SlimebusError, UsageError
from slimebus.joining import broker_address
from slimebus.prompt_record import BYTE_ORDER_MARK, LineReader, PromptKeys
from slimebus.prompts import BATCH_PROMPTS, PromptClient, Pushed, batches_of, in_all

PAUSE_S = 0.2
"""A pipe that gives nothing for so long has its lines pushed."""


@click.command(cls=ConfigCommand, short_help="Push prompts into a run while it goes on.")
@click.argument("words", nargs=-1, metavar="[RUN.yaml] FILE...")
@click.option("--broker", help="[address] Of the broker, tcp://HOST:PORT; default: broker.bind of the config.")
@click.option("--front", is_flag=True, help="Before the prompts that were pushed without it.")
@click.option("--key", default="", help="[name] A push of the same key and prompts adds nothing; default: made from a file's content.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each file.")
@click.option("--timeout-s", default=60.0, show_default=True, help="[seconds] How long to wait for the broker, or for room in it.")
@click.pass_context
def push(ctx: click.Context, words: tuple[str, ...], broker: str | None, front: bool, key: str, as_json: bool, timeout_s: float) -> None:
    """Push the prompts of jsonl files into a run while it goes on; `-` reads lines from a pipe as they come.

    A file is checked whole before anything of it is pushed. They are sampled before the prompts of the run's own files.
    """
    config, files = parse(words)
    resolved = from_context(ctx, config)
    keys, key_name = resolved.keys_path or "", resolved.config.security.key_name
    with PromptClient(broker_address(resolved, broker), timeout_s=timeout_s, keys=keys, key_name=key_name) as client:
        for number, file in enumerate(files):
            done = _push_file(client, resolved, file, f"{key}/{number}" if key else "", front=front)
            click.echo(json.dumps({"file": file, **msgspec.structs.asdict(done)}) if as_json else _sentence(file, done))


def parse(words: tuple[str, ...]) -> tuple[Path | None, list[str]]:
    """The run.yaml if the first word is one, and the files. Raises UsageError when there is none."""
    config, files = split_words(words)
    if not files:
        raise UsageError("push: no file given; name jsonl files of prompts, or - for a pipe")
    return config, list(files)


def _push_file(client: PromptClient, resolved: Resolved, file: str, key: str, *, front: bool) -> Pushed:
    data = resolved.config.data
    reader = LineReader(PromptKeys(prompt=data.input_key, label=data.label_key, metadata=data.metadata_key, tools=data.tool_key))
    if file == "-":
        lines = enumerate(sys.stdin.buffer, 1) if key else _until_pause(sys.stdin.buffer)
        records = _records(lines, "stdin", reader, _on_bad(data.skip_bad_prompts))
        return _push_all(client, records, key, front=front)
    try:
        with Path(file).open("rb") as content:
            digest = xxhash.xxh3_128()
            for record in _records(enumerate(content, 1), file, reader, _on_bad(data.skip_bad_prompts)):
                digest.update(record or b"")
            content.seek(0)
            records = _records(enumerate(content, 1), file, reader, lambda bad: None)
            return _push_all(client, records, key or digest.hexdigest(), front=front)
    except OSError as bad:
        raise DataError(f"{file} cannot be read: {bad.strerror or bad}") from None


def _on_bad(skips_bad: bool) -> Callable[[DataError], None]:
    def refuse(bad: DataError) -> None:
        if not skips_bad:
            raise bad
        click.echo(f"skipped {bad.text}", err=True)

    return refuse


def _push_all(client: PromptClient, records: Iterator[bytes | None], key: str, *, front: bool) -> Pushed:
    done: list[Pushed] = []
    stem = key or secrets.token_hex(8)
    try:
        for number, batch in enumerate(_batches(records)):
            done.append(client.push_batch(batch, key=f"{stem}/{number}", front=front))
    except SlimebusError:
        if accepted := in_all(done).accepted:
            rest = "; the same command goes on behind them" if key else ""
            click.echo(f"{accepted} prompts were pushed{rest}", err=True)
        raise
    return in_all(done)


def _batches(records: Iterator[bytes | None]) -> Iterator[list[bytes]]:
    """Batches of records, cut at each None; what comes before a malformed line is not lost with it."""
    pending: list[bytes] = []
    try:
        for record in records:
            if record is not None:
                pending.append(record)
            if len(pending) >= BATCH_PROMPTS or record is None:
                yield from batches_of(pending)
                pending = []
    except DataError as bad:
        yield from batches_of(pending)
        raise bad
    yield from batches_of(pending)


def _records(
    lines: Iterable[tuple[int, bytes | None]], name: str, reader: LineReader, on_bad: Callable[[DataError], None]
) -> Iterator[bytes | None]:
    """The record of each line, None where the lines pause. `on_bad` is told file, line and reason."""
    for number, line in lines:
        line = line.removeprefix(BYTE_ORDER_MARK) if number == 1 and line else line
        if line is None:
            yield None
        elif not line.isspace():
            try:
                yield reader.record(line)
            except DataError as bad:
                on_bad(DataError(f"{name}:{number}: {bad.text}"))


def _until_pause(pipe: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Numbered lines as they come, and a None whenever none comes for a moment."""
    lines: queue.Queue[tuple[int, bytes] | None] = queue.Queue(maxsize=BATCH_PROMPTS)

    def read() -> None:
        for numbered in enumerate(pipe, 1):
            lines.put(numbered)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    has_paused = True
    while True:
        try:
            numbered = lines.get(timeout=None if has_paused else PAUSE_S)
        except queue.Empty:
            has_paused = True
            yield 0, None
            continue
        if numbered is None:
            return
        has_paused = False
        yield numbered


def _sentence(file: str, done: Pushed) -> str:
    if not done.ids:
        return f"{file}: no prompts"
    again = " (pushed before; another --key pushes them again)" if done.duplicate else ""
    span = f"{done.ids[0]} to {done.ids[-1]}"
    return f"{file}: {done.accepted} accepted, {done.duplicate} duplicate{again}: {span}; {done.waiting} wait to be sampled"
