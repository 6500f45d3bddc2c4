"""From the config to the objective: plug-ins found by the name of their file or by import path, their settings checked."""

import importlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from slimebus.bus.errors import HookError
from slimebus.config import Resolved, RunConfig
from slimebus.config.convert import Converter, nearest_of, written_here
from slimebus.config.load import raise_all
from slimebus.hooks import hooks
from trainer.objective.objective import Objective
from trainer.objective.plugin import Algorithm, Correction, Plugin
from trainer.objective.plugin_settings import KINDS, known_settings, plugin_names
from trainer.objective.problems import objective_problems as problems_of

P = TypeVar("P", bound=Plugin)


def build_objective(config: RunConfig, base: Path | None = None) -> Objective:
    """The objective of a run. base: the folder of the run.yaml, for plug-ins by path. Raises ConfigError with every mistake."""
    objective, problems = _build(config, base, {})
    raise_all(problems)
    assert objective is not None  # without a problem there is one
    return objective


def algorithm_problems(resolved: Resolved) -> list[str]:
    """Every mistake in the section `algorithm` that only the plug-ins know, a sentence each."""
    return _build(resolved.config, resolved.base, resolved.origin)[1]


def _build(config: RunConfig, base: Path | None, origin: Mapping[str, str]) -> tuple[Objective | None, list[str]]:
    problems: list[str] = []
    algorithm = _load_plugin_class("algorithms", config.algorithm.advantage_estimator, Algorithm, base, problems)
    found = [_load_plugin_class("corrections", name, Correction, base, problems) for name in config.algorithm.corrections]
    corrections = [correction for correction in found if correction is not None]
    for name in {name for name in config.algorithm.corrections if config.algorithm.corrections.count(name) > 1}:
        problems.append(f"algorithm.corrections: {name} is named twice; keep one of them")
    if algorithm is None or problems:
        return None, problems
    settings = _settings(config.algorithm.settings, [algorithm, *corrections], origin, problems)
    objective = Objective(
        config, algorithm(config, settings[0]), [cls(config, own) for cls, own in zip(corrections, settings[1:], strict=True)]
    )
    return objective, problems + list(problems_of(objective))


def _load_plugin_class(kind: str, name: str, of: type[P], base: Path | None, problems: list[str]) -> type[P] | None:
    """The plug-in class of this name in trainer/algorithms or trainer/corrections, or at this import path."""
    try:
        if ":" in name:
            found: Any = hooks.load(name, base=base)
            if not (inspect.isclass(found) and issubclass(found, of)):
                problems.append(f"{KINDS[kind]}: {name} is no class that derives from {of.__module__}.{of.__name__}")
                return None
            if not (inspect.isclass(found.Settings) and issubclass(found.Settings, Plugin.Settings)):
                remedy = f"class Settings({of.__name__}.Settings, frozen=True)"
                problems.append(f"{KINDS[kind]}: the Settings of {name} derive from no Settings: {remedy}")
                return None
            return found
    except HookError as bad:
        problems.append(f"{KINDS[kind]}: {bad.text}")
        return None
    if name not in plugin_names(kind):
        there = f"there are {', '.join(plugin_names(kind))}, or your own by import path, file.py:Class{written_here(KINDS[kind], name)}"
        problems.append(f"{KINDS[kind]}: no {name!r} in trainer/{kind}{nearest_of(name, plugin_names(kind))}; {there}")
        return None
    return class_in(importlib.import_module(f"trainer.{kind}.{name}"), of)


def class_in(module: Any, of: type[P]) -> type[P]:
    """The one class of a module of trainer/algorithms or trainer/corrections that is a plug-in."""
    (found,) = [
        value
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, of) and value.__module__ == module.__name__ and not name.startswith("_")
    ]
    return found


def _settings(given: Mapping[str, Any], plugins: list[type[Any]], origin: Mapping[str, str], problems: list[str]) -> list[Plugin.Settings]:
    """The settings of each plug-in, those it has of the ones given; what none has is a problem."""
    fields = [{field.name for field in msgspec.structs.fields(plugin.Settings)} for plugin in plugins]
    known = sorted(set().union(*fields))
    for name in given.keys() - set(known):
        owners = known_settings().get(str(name))
        where = f"; it belongs to {', '.join(owners)}" if owners else nearest_of(str(name), known)
        place, chosen = origin.get(f"algorithm.settings.{name}", "config"), ", ".join(plugin.__name__.lower() for plugin in plugins)
        problems.append(f"{place}: algorithm.settings.{name}: no setting of {chosen}{where}")
    converter = Converter(origin, problems)
    return [
        converter.struct(plugin.Settings, {name: given[name] for name in given if name in own}, "algorithm.settings")
        for plugin, own in zip(plugins, fields, strict=True)
    ]
