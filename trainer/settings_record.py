"""The settings that a run was last trained with, in RUN_DIR/trainer-settings.json: a resumed trainer logs what has changed since."""

import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path

import msgspec

from slimebus.atomic_file import replacing
from trainer.arguments.agreement import UNSET

log = logging.getLogger("trainer")

FILE = "trainer-settings.json"


def note_settings(run_dir: Path, settings: Mapping[str, str], *, is_resumed: bool) -> None:
    """Log a line for each setting that differs from those recorded, where the run goes on from a checkpoint; record these."""
    before: dict[str, str] = {}
    with contextlib.suppress(OSError, msgspec.DecodeError):  # a run from before there was a record
        before = msgspec.json.decode((run_dir / FILE).read_bytes(), type=dict[str, str])
    if is_resumed and before:
        for name in sorted(before.keys() | settings.keys()):
            old, new = before.get(name, UNSET), settings.get(name, UNSET)
            if old != new:
                log.warning("changed since the run was last started: %s: %s -> %s", name, old, new)
    run_dir.mkdir(parents=True, exist_ok=True)
    with replacing(run_dir / FILE) as file:
        file.write(msgspec.json.format(msgspec.json.encode(dict(settings)), indent=2))
