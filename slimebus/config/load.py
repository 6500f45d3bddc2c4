"""From run.yaml, flags and environment to one checked RunConfig that knows where each value came from.

Order, strongest first: a flag, the file, an environment variable (SLIMEBUS_<SECTION>_<FIELD>), the default.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_origin

import msgspec
import yaml

from slimebus.bus.errors import ConfigError
from slimebus.config.convert import Converter
from slimebus.config.field_rules import rule_problems
from slimebus.config.schema import OPEN_MAPS, RunConfig, flag_of, paths
from slimebus.prompts.prompt_record import PromptKeys
from slimebus.prompts.verifiers_tasks import FILE

TYPED = ("--", "SLIMEBUS_")
"""How the place of a value begins that is from no file."""


class Resolved(msgspec.Struct, frozen=True):
    """A checked config. origin: dotted name -> where its value came from; base: the folder of the run.yaml."""

    config: RunConfig
    origin: dict[str, str]
    base: Path

    def path(self, value: str) -> Path:
        """A path of the config: absolute, or relative to the run.yaml."""
        return self.base / os.path.expanduser(value)

    @property
    def keys_path(self) -> Path | None:
        """The folder or file of security.keys, None when there is none; from the file relative to it, from a flag to where we are."""
        return self._given("security.keys", self.config.security.keys) if self.config.security.keys else None

    @property
    def model_dir(self) -> Path:
        """The directory of model.hf_checkpoint. Raises ConfigError when it is not set or holds no model."""
        given = self.config.model.hf_checkpoint
        if given and (self.path(given) / "config.json").is_file():
            return self.path(given)
        what = f": no model at {self.path(given)}" if given else " is not set"
        raise ConfigError(f"model.hf_checkpoint{what}; expected a Hugging Face directory (config.json, safetensors, tokenizer)")

    @property
    def prompt_keys(self) -> PromptKeys:
        """Where the lines of prompt files keep what."""
        data, own = self.config.data, {"environment": self.config.rollout.environment}
        return PromptKeys(prompt=data.input_key, label=data.label_key, metadata=data.metadata_key, tools=data.tool_key, **own)

    @property
    def weights_dir(self) -> Path | None:
        """Where this run's weights lie; None when workers pull from the trainer."""
        given = self.config.weights.weights_dir
        return self.path(given) / self.config.name if given else None

    @property
    def run_dir(self) -> Path:
        """Where everything the run makes is kept: from the file relative to it; from a flag, or by default, to where we are."""
        return self._given("run_dir", self.config.run_dir) if self.config.run_dir else Path(f"runs/{self.config.name}")

    def _given(self, name: str, value: str) -> Path:
        """A path of the field `name`: from a flag or the environment relative to where we are, from the file to that."""
        given = Path(os.path.expanduser(value))
        return given if self.origin.get(name, "").startswith(TYPED) else self.base / given

    @property
    def expected_run(self) -> str:
        """The name that the run must have which is asked about; empty where the user named none."""
        from_file = any(not place.startswith(TYPED) for place in self.origin.values())
        return self.config.name if from_file or "name" in self.origin else ""


def resolve(file: Path | None, flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> Resolved:
    """The config of a run. `flags`: dotted name -> text or value. Raises ConfigError with every mistake: the key, its place, the remedy."""
    resolved, problems, _ = read(file, flags, environ)
    raise_all(problems)
    return resolved


def read(
    file: Path | None, flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
) -> tuple[Resolved, list[str], set[str]]:
    """Like `resolve`, but with the mistakes beside a config in which defaults stand in for the broken fields, and their names.

    Raises ConfigError for a file that cannot be read as a map.
    """
    problems: list[str] = []
    tree, origin = read_map(file, problems) if file else ({}, {})
    environ = os.environ if environ is None else environ
    for name in paths():
        variable = "SLIMEBUS_" + name.replace(".", "_").upper()
        if variable in environ and name not in origin:
            _put(tree, origin, name, environ[variable], variable)
    for name, value in (flags or {}).items():
        _put(tree, origin, name, value, f"--{flag_of(name)}")
    converter = Converter(origin, problems)
    config = _with_tasks(converter.config(tree))
    problems += without(converter.broken, rule_problems(config))
    return Resolved(config, origin, file.resolve().parent if file else Path.cwd()), problems, converter.broken


def _with_tasks(config: RunConfig) -> RunConfig:
    """With the tasks of an environment as prompts, where it has no others."""
    data = config.data
    if not config.rollout.environment or data.prompt_data or data.source_path or data.wait_for_push:
        return config
    return msgspec.structs.replace(config, data=msgspec.structs.replace(data, prompt_data=[FILE]))


def without(broken: Iterable[str], problems: Iterable[str]) -> list[str]:
    """The problems that do not follow from a broken field: none that names one."""
    words = {name.rpartition(".")[2] for name in broken}
    return [problem for problem in problems if words.isdisjoint(re.findall(r"\w+", problem))]


def raise_all(problems: Sequence[str]) -> None:
    """Raise ConfigError with all of these, when there is one: each on a line of its own."""
    if problems:
        lines = [f"{len(problems)} mistakes:", *(f"  {problem}" for problem in problems)]
        raise ConfigError(problems[0] if len(problems) == 1 else "\n".join(lines))


def read_map(file: Path, problems: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The map of a YAML file, and the place of each of its values by dotted name; keys given twice are added to `problems`.

    Raises ConfigError for a file that cannot be read as a map."""
    origin: dict[str, str] = {}
    try:
        text = file.read_text()
        node, tree = yaml.compose(text, Loader=yaml.SafeLoader), yaml.safe_load(text)
        _note_places(node, "", str(file), origin, problems)
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file; `slimebus init` writes a commented run.yaml") from None
    except IsADirectoryError:
        raise ConfigError(f"{file}: a folder; expected a YAML file (a run's directory is given as --run-dir {file})") from None
    except (OSError, UnicodeDecodeError) as bad:
        raise ConfigError(f"{file}: cannot be read: {bad}") from None
    except RecursionError:
        raise ConfigError(f"{file}: nested too deeply; expected a map of sections") from None
    except (yaml.YAMLError, ValueError, TypeError) as bad:
        raise ConfigError(_not_yaml(file, bad)) from None
    if tree is not None and not isinstance(tree, dict):
        raise ConfigError(f"{file}: expected a map of sections, got a {type(tree).__name__}")
    return tree or {}, origin


def _not_yaml(file: Path, bad: Exception) -> str:
    mark, problem = getattr(bad, "problem_mark", None), getattr(bad, "problem", None)
    place = f"{file}:{mark.line + 1}" if mark is not None else str(file)
    if problem and "'\\t'" in problem:
        return f"{place}: a tab; YAML is indented with spaces only"
    return f"{place}: not YAML: {problem or ' '.join(str(bad).split())}"


def _note_places(node: Any, prefix: str, file: str, origin: dict[str, str], problems: list[str]) -> None:
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        name, place = f"{prefix}{key.value}", f"{file}:{key.start_mark.line + 1}"
        if name in origin:
            problems.append(f"{place}: {name} is given twice; keep one of them")
        origin[name] = place
        _note_places(value, f"{name}.", file, origin, problems)


def _put(tree: dict[str, Any], origin: dict[str, str], name: str, value: Any, source: str) -> None:
    *sections, field = name.split(".")
    for section in sections:
        if not isinstance(tree.get(section), dict):
            tree[section] = {}
        tree = tree[section]
    tree[field] = _of_text(name, value) if isinstance(value, str) else value
    origin[name] = source


def _of_text(name: str, text: str) -> Any:
    """Text for a list field is comma-separated; text for an open map is YAML."""
    if name.rpartition(".")[0] in OPEN_MAPS:
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError:
            return text
    is_list = name in paths() and get_origin(paths()[name].type) is list
    return [part for part in text.split(",") if part] if is_list else text
