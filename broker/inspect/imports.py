"""Groups from a folder that `slimebus buffer export` wrote, or prompts from any jsonl file of prompts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from broker.state.edits import IMPORTED
from slimebus.bus.errors import DataError, ProtocolError
from slimebus.bus.messages import Import
from slimebus.bus.sample_table import check_group, encode_table
from slimebus.client.exported_groups import GROUPS_FILE, ExportedGroup, numbered_rows, read_frames


class Incoming(msgspec.Struct):
    """One group to import: the message and its bulk frames."""

    message: Import
    frames: list[bytes]


class ImportRow(ExportedGroup):
    """A line of an export, or of a file of prompts."""

    group: str = ""
    prompt: Any = None
    lineage: str = ""
    label: Any = None
    metadata: dict[str, Any] | None = None


def read_groups(path: Path, *, prompts_only: bool = False) -> Iterator[Incoming]:
    """The groups of an export or a jsonl file of prompts, each checked. Raises DataError naming file, line and reason.

    prompts_only: leave the samples out.
    """
    file = path / GROUPS_FILE if path.is_dir() else path
    for number, row in numbered_rows(file, ImportRow):
        if isinstance(row, DataError):
            raise row
        yield _incoming(f"{file}:{number}", path, row, number, prompts_only)


def _incoming(place: str, path: Path, row: ImportRow, number: int, prompts_only: bool) -> Incoming:
    name = row.group or f"{path.name}/{number}"
    prompt = row.prompt
    if not isinstance(prompt, dict):
        prompt = {"prompt": prompt, "label": row.label, "metadata": row.metadata or {}}
    if not isinstance(prompt.get("prompt"), str | list):
        raise DataError(f"{place}: group {name!r} has no prompt; expected text, or a list of chat messages, under 'prompt'")
    message = Import(group=name if name.startswith(IMPORTED) else IMPORTED + name, lineage=row.lineage)
    frames = [msgspec.msgpack.encode(prompt)]
    if row.table is not None and not prompts_only:
        try:
            frames += [encode_table(row.table), *read_frames(path / Path(row.arrays).name, row.group, row.table)]
            check_group(frames[1:])
        except ProtocolError as bad:
            raise DataError(f"{place}: group {name!r}: {bad.text}") from None
    return Incoming(message, frames)
