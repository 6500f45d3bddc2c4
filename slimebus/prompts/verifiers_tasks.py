"""An environment of verifiers (https://github.com/PrimeIntellect-ai/verifiers): how it is loaded, and its tasks as prompts.

The broker reads the tasks, workers run them (rollout/environment.py). The library is imported when it is needed, and not before.
"""

import importlib
import sys
import tomllib
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from slimebus.bus.errors import ConfigError
from slimebus.hooks.hooks import text_of

if TYPE_CHECKING:
    from slimebus.prompts.prompt_record import PromptKeys

VERSION = "0.4.0"
"""The release that rollout/environment.py was written for; its interface changes with each minor one."""
FILE = "environment"
"""What names the tasks among the files of prompts."""
NEEDED = "an environment is a package, installed or beside the run.yaml, that exports its one Taskset subclass in __all__ (docs/agents.md)"
TASK = "task"
"""The key of the metadata that names a prompt's task."""


def is_tasks(path: Path, environment: str) -> bool:
    """Whether this path of a prompt file means the tasks of the run's environment."""
    return bool(environment) and path.name == FILE and not path.exists()


def load(name: str, base: Path) -> tuple[Any, Any, Any]:
    """The module verifiers.v1, its config of the environment of this name, and of which tasks of it.

    A package, or a TOML file with verifiers' tables `[env]` and `[select]`; both are also found in `base`, the folder of the run.yaml.
    Raises ConfigError with the remedy.
    """
    from importlib.metadata import distributions

    if (found := next((one.version for one in distributions(name="verifiers")), "none")) != VERSION:
        raise ConfigError(f"environment {name} needs verifiers {VERSION}, and here is {found}; pip install 'slimebus[verifiers]'")
    if str(base.resolve()) not in sys.path:
        sys.path.append(str(base.resolve()))
    try:
        verifiers = importlib.import_module("verifiers.v1")
        tree = tomllib.loads((base / name).read_text()) if name.endswith(".toml") else {"env": {"taskset": {"id": name}}}
        return verifiers, verifiers.resolve_env_config(tree["env"]), verifiers.SelectConfig(**tree.get("select", {}))
    except ModuleNotFoundError as bad:  # verifiers' own text says that the package must be installed, and names none that it imports
        missing = getattr(bad.__cause__ or bad, "name", name)
        raise ConfigError(f"environment {name} cannot be loaded: there is no module {missing}; {NEEDED}") from bad
    except (Exception, SystemExit) as bad:  # an environment's module may fail in any way
        raise ConfigError(f"environment {name} cannot be loaded: {type(bad).__name__}: {text_of(bad)}") from bad


def tasks_of(taskset: Any, select: Any) -> dict[str, Any]:
    """The tasks (`verifiers.v1.Task`) that are selected of a taskset by key, in their order. Raises ConfigError where they have no end."""
    if not (selected := taskset.select(select)).bounded:
        raise ConfigError("rollout.environment: its tasks have no end; name a TOML file that has a `limit` of them under [select]")
    return {task.key: task for task in selected}


def messages_of(data: Any) -> list[dict[str, Any]]:
    """The chat messages that a task begins with: its system prompt and its prompt."""
    given = [{"role": "user", "content": data.prompt}] if isinstance(data.prompt, str) else data.prompt or []
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    return [*system, *(one if isinstance(one, dict) else one.model_dump(exclude_none=True) for one in given)]


def write_tasks(base: Path, keys: "PromptKeys", target: IO[bytes]) -> None:
    """Write a line of JSON for each task: its messages, and its key in the metadata. Raises ConfigError."""
    verifiers, config, select = load(keys.environment, base)
    try:
        for key, task in tasks_of(verifiers.load_taskset(config.taskset), select).items():
            prompt = messages_of(task.data) or [{"role": "user", "content": task.data.name or key}]  # some have another agent ask
            target.write(msgspec.json.encode({keys.prompt: prompt, keys.metadata: {TASK: key}}) + b"\n")
    except ConfigError:
        raise
    except (Exception, SystemExit) as bad:  # a taskset may fail in any way
        text = f"the tasks of environment {keys.environment} cannot be read: {type(bad).__name__}: {text_of(bad)}"
        raise ConfigError(text) from bad
