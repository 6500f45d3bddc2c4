"""The config of a run in its run directory: for commands that look at the run later, and for its next start, which compares."""

import contextlib
import json
import logging
import re
from pathlib import Path
from typing import Any

import msgspec

from slimebus.atomic_file import replacing
from slimebus.bus.errors import DataError, UsageError
from slimebus.config.agreement import MEANING, recorded_settings
from slimebus.config.load import Resolved
from slimebus.config.schema import RunConfig

log = logging.getLogger("slimebus")

FILE = "config.json"
SECRET = re.compile(r"api[-_]?key|secret|passw|hf[-_]?token", re.IGNORECASE)


def without_secrets(config: RunConfig) -> dict[str, Any]:
    """The config as plain maps, with `...` in the place of what nobody else should read."""

    def shown(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shown(str(key), one) for key, one in value.items()}
        return "..." if value and SECRET.search(name) else value

    return dict(shown("", msgspec.to_builtins(config)))


def save_config(resolved: Resolved) -> None:
    """Write RUN_DIR/config.json: the config without secrets, the folder that its paths are relative to, and hashes of what they name."""
    own = {"base": str(resolved.base.resolve()), "recorded": recorded_settings(resolved)}
    text = json.dumps({**own, "config": without_secrets(resolved.config)}, indent=1)
    with replacing(resolved.run_dir / FILE) as file:
        file.write(text.encode())


def note_changes(resolved: Resolved, *, is_confirmed: bool) -> None:
    """Log what changed since a run that has trained a step was last started.

    Raises UsageError for what its samples rest on (agreement.py: MEANING), unless the user confirmed that.
    """
    before: dict[str, str] = {}
    if (other := run_elsewhere(resolved)) is not None:
        log.warning("a new run begins in %s; this file's run is in %s: --run-dir goes on there", resolved.run_dir, other)
    if (resolved.run_dir / "metrics" / "broker.jsonl").is_file():
        with contextlib.suppress(OSError, ValueError, AttributeError):
            before = json.loads((resolved.run_dir / FILE).read_text()).get("recorded", {})
    now = recorded_settings(resolved)
    changed = {name: f"{name}: {before[name]} -> {now[name]}" for name in now if name in before and before[name] != now[name]}
    if (refused := [text for name, text in changed.items() if name in MEANING]) and not is_confirmed:
        remedy = "put it back, start in a new run directory, or go on in spite of it with --accept-changes"
        raise UsageError(f"changed since the run was last started: {'; '.join(refused)}; {remedy}")
    for text in changed.values():
        log.warning("changed since the run was last started: %s", text)


def run_elsewhere(resolved: Resolved) -> Path | None:
    """Where this run is when its directory is new: in runs/NAME of a folder above the run.yaml, where it may have been started before."""
    if resolved.config.run_dir or (resolved.run_dir / FILE).is_file():
        return None
    base = resolved.base.resolve()
    for place in (folder / resolved.run_dir for folder in (base, *base.parents)):
        with contextlib.suppress(DataError):
            if saved_config(place).base == base:
                return place
    return None


def saved_config(run_dir: Path) -> Resolved:
    """The config that the run in this directory last ran with. Raises DataError where there is none."""
    try:
        found = json.loads((run_dir / FILE).read_text())
        config = msgspec.convert(found["config"], RunConfig)
        return Resolved(msgspec.structs.replace(config, run_dir=str(run_dir)), {"name": FILE, "run_dir": "--run-dir"}, Path(found["base"]))
    except FileNotFoundError:
        raise DataError(f"{run_dir} is no run directory: it has no {FILE}, which the run's broker writes when it starts") from None
    except (OSError, ValueError, KeyError, TypeError, msgspec.ValidationError) as bad:
        raise DataError(f"{run_dir / FILE}: {bad}; the run may be of another release") from None
