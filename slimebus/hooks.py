"""Plug-ins by import path: `package.module:name` or `path/to/file.py:name`, checked when the process starts."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from slimebus.errors import HookError


def load(path: str, *, base: Path | None = None) -> Callable[..., Any]:
    """The callable at `path`; a file is looked for relative to `base` (the folder of the run's YAML) and then as given.

    Raises HookError that names the path and what is wrong with it.
    """
    module_name, colon, name = path.rpartition(":")
    if not colon or not module_name or not name:
        raise HookError(f"hook {path!r}: expected pkg.module:name or file.py:name")
    module = _from_file(path, module_name, base) if module_name.endswith(".py") else _from_package(path, module_name)
    target = getattr(module, name, None)
    if target is None:
        raise HookError(f"hook {path!r}: {module_name} has no {name!r}; it has {', '.join(_public(module)) or 'no public names'}")
    if not callable(target):
        raise HookError(f"hook {path!r}: {name} is a {type(target).__name__}, expected something callable")
    return target  # type: ignore[no-any-return]


def _public(module: ModuleType) -> list[str]:
    return [name for name in vars(module) if not name.startswith("_") and callable(getattr(module, name))][:8]


def _from_package(path: str, module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as missing:
        raise HookError(f"hook {path!r}: cannot import {missing.name}; is it installed, or did you mean a file.py:name?") from None


def _from_file(path: str, file_name: str, base: Path | None) -> ModuleType:
    candidates = [Path(file_name)] if base is None else [base / file_name, Path(file_name)]
    file = next((f.resolve() for f in candidates if f.is_file()), None)
    if file is None:
        raise HookError(f"hook {path!r}: no such file; looked at {', '.join(str(f.resolve()) for f in candidates)}")
    name = f"slimebus_hook_{file.stem}_{abs(hash(str(file))):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise HookError(f"hook {path!r}: {file} is not Python source")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as bad:  # a plug-in's file may fail in any way
        del sys.modules[name]
        raise HookError(f"hook {path!r}: {file} failed when loaded: {type(bad).__name__}: {bad}") from bad
    return module
