"""From run.yaml, flags and environment to one checked RunConfig that knows where each value came from.

Order, strongest first: a flag, the file, an environment variable (SLIMEBUS_<SECTION>_<FIELD>), the default.
"""

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from slimebus.config.check import check
from slimebus.config.schema import OPEN_MAPS, SECTIONS, EvalDataset, RunConfig, paths
from slimebus.errors import ConfigError


class Resolved(msgspec.Struct, frozen=True):
    """A checked config. origin: dotted name -> where its value came from; base: the folder of the run.yaml."""

    config: RunConfig
    origin: dict[str, str]
    base: Path

    def path(self, value: str) -> Path:
        """A path of the config: absolute, or relative to the run.yaml."""
        return Path(os.path.expanduser(value)) if os.path.isabs(os.path.expanduser(value)) else self.base / value

    @property
    def keys_path(self) -> Path | None:
        """The folder or file of security.keys, None when there is none; from the file relative to it, from a flag to where we are."""
        given = os.path.expanduser(self.config.security.keys)
        if not given:
            return None
        is_typed = self.origin.get("security.keys", "").startswith(("--", "SLIMEBUS_"))
        return Path(given) if os.path.isabs(given) or is_typed else self.base / given

    @property
    def model_dir(self) -> Path:
        """The directory of model.hf_checkpoint. Raises ConfigError when it is not set or holds no model."""
        given = self.config.model.hf_checkpoint
        if not given:
            raise ConfigError("model.hf_checkpoint is not set; name a Hugging Face directory (config.json, safetensors, tokenizer)")
        if not (self.path(given) / "config.json").is_file():
            raise ConfigError(
                f"model.hf_checkpoint: no model at {self.path(given)}; "
                "expected a Hugging Face directory (config.json, safetensors, tokenizer)"
            )
        return self.path(given)

    @property
    def weights_dir(self) -> Path | None:
        """Where this run's weights lie for weights_transport: disk; None when workers pull from the trainer."""
        weights = self.config.weights
        return self.path(weights.weights_dir) / self.config.name if weights.weights_transport == "disk" else None

    @property
    def run_dir(self) -> Path:
        """Where everything the run makes is kept; relative to the current directory."""
        return Path(self.config.run_dir or f"runs/{self.config.name}")


def resolve(file: Path | None, flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> Resolved:
    """The config of a run. `flags`: dotted name -> text or value. Raises ConfigError naming the key, its place and the remedy."""
    tree, origin = _read(file) if file else ({}, {})
    for variable, name in _variables().items():
        if variable in (environ if environ is not None else os.environ):
            _put(tree, origin, name, (environ if environ is not None else os.environ)[variable], variable, weak=True)
    for name, value in (flags or {}).items():
        _put(tree, origin, _known(name, "flag"), value, f"--{name.rpartition('.')[2].replace('_', '-')}")
    try:
        config = msgspec.convert(tree, RunConfig, strict=False)
    except msgspec.ValidationError as bad:
        raise ConfigError(_explain(str(bad), origin)) from None
    check(config)
    return Resolved(config, origin, file.resolve().parent if file else Path.cwd())


def _variables() -> dict[str, str]:
    return {"SLIMEBUS_" + name.replace(".", "_").upper(): name for name in paths()}


def _read(file: Path) -> tuple[dict[str, Any], dict[str, str]]:
    try:
        text = file.read_text()
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        tree = yaml.safe_load(text)
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file; `slimebus init` writes a commented one") from None
    except (OSError, UnicodeDecodeError) as bad:
        raise ConfigError(f"{file}: cannot be read: {bad}") from None
    except yaml.YAMLError as bad:
        raise ConfigError(f"{file}: not YAML: {' '.join(str(bad).split())}") from None
    if tree is None:
        return {}, {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: expected a map of sections, got a {type(tree).__name__}")
    origin: dict[str, str] = {}
    _walk(file, node, "", origin)
    return {name: value for name, value in tree.items() if value is not None or name not in SECTIONS}, origin


def _walk(file: Path, node: Any, prefix: str, origin: dict[str, str]) -> None:
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        place = f"{file}:{key.start_mark.line + 1}"
        if name in OPEN_MAPS or name == "eval.datasets":
            _leaves(value, name, file, origin)
        elif name in SECTIONS:
            if not isinstance(value, yaml.MappingNode):
                if value.tag == "tag:yaml.org,2002:null":
                    continue
                raise ConfigError(f"{place}: {name} is a section; expected `field: value` lines under it")
            _walk(file, value, f"{name}.", origin)
        else:
            _known(name, place)
            origin[name] = place


def _leaves(node: Any, name: str, file: Path, origin: dict[str, str]) -> None:
    origin[name] = f"{file}:{node.start_mark.line + 1}"
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if name.startswith("eval.datasets."):
                _dataset_field(key, file)
            _leaves(value, f"{name}.{key.value}", file, origin)


def _dataset_field(key: Any, file: Path) -> None:
    names = [f.name for f in msgspec.structs.fields(EvalDataset)]
    if key.value not in names:
        raise ConfigError(f"{file}:{key.start_mark.line + 1}: unknown key {key.value!r} of an eval dataset{nearest(key.value, names)}")


def _known(name: str, place: str) -> str:
    if name in paths() or name.split(".")[0] in OPEN_MAPS:
        return name
    raise ConfigError(f"{place}: unknown key {name!r}{nearest(name, list(paths()) + list(SECTIONS) + list(OPEN_MAPS))}")


def nearest(name: str, names: list[str]) -> str:
    """`; did you mean 'x'?`, or nothing when no name is near. A name of another section is found by its last part."""
    last = name.rpartition(".")[2].replace("-", "_")
    exact = [n for n in names if n.rpartition(".")[2] == last]
    close = exact or difflib.get_close_matches(name, names, 1, 0.6)
    if not close:
        by_last = {n.rpartition(".")[2]: n for n in names}
        close = [by_last[n] for n in difflib.get_close_matches(last, list(by_last), 1, 0.6)]
    return f"; did you mean {close[0]!r}?" if close else ""


def _put(tree: dict[str, Any], origin: dict[str, str], name: str, value: Any, source: str, *, weak: bool = False) -> None:
    *sections, field = name.split(".")
    branch = tree
    for section in sections:
        if branch.get(section) is None:
            branch[section] = {}
        branch = branch[section]
    if weak and field in branch:
        return
    branch[field] = _listed(name, value)
    origin[name] = source


def _listed(name: str, value: Any) -> Any:
    """Text for a list field is comma-separated; text for an open map is YAML."""
    if not isinstance(value, str):
        return value
    if name.split(".")[0] in OPEN_MAPS:
        return yaml.safe_load(value)
    field = paths().get(name)
    default = field.default if field else None
    factory = getattr(field, "default_factory", None)
    if isinstance(default, list) or factory is list:
        return [part for part in value.split(",") if part]
    return value


def _explain(message: str, origin: Mapping[str, str]) -> str:
    """msgspec's `Expected `int`, got `str` - at `$.rollout.num_rollout`` with its place in front."""
    text, _, path = message.partition(" - at `")
    name = path.removesuffix("`").removeprefix("$.")
    place = origin.get(name) or origin.get(name.rpartition("[")[0]) or "config"
    return f"{place}: {name}: {text}" if name else f"config: {message}"
