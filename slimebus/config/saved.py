"""The config of a run in its run directory, for commands that look at the run later."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec

from slimebus.atomic_file import replacing
from slimebus.bus.errors import DataError
from slimebus.config.load import Resolved
from slimebus.config.schema import RunConfig

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
    """Write RUN_DIR/config.json: the config without secrets, and the folder that its paths are relative to."""
    text = json.dumps({"base": str(resolved.base.resolve()), "config": without_secrets(resolved.config)}, indent=1)
    with replacing(resolved.run_dir / FILE) as file:
        file.write(text.encode())


def saved_config(run_dir: Path) -> Resolved:
    """The config that the run in this directory last ran with. Raises DataError where there is none."""
    try:
        found = json.loads((run_dir / FILE).read_text())
        config = msgspec.convert(found["config"], RunConfig)
        return Resolved(msgspec.structs.replace(config, run_dir=str(run_dir)), {"name": FILE}, Path(found["base"]))
    except FileNotFoundError:
        raise DataError(f"{run_dir} is no run directory: it has no {FILE}, which the run's broker writes when it starts") from None
    except (OSError, ValueError, KeyError, TypeError, msgspec.ValidationError) as bad:
        raise DataError(f"{run_dir / FILE}: {bad}; the run may be of another release") from None
