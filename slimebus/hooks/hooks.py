"""Plug-ins by import path: `package.module:name` or `path/to/file.py:name`, checked when the process starts."""

import contextlib
import importlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from slimebus.bus.errors import HookError

SHOWN = 300
FROM_FILE = "slimebus_hook_"
"""What the names of modules begin with that were loaded from a file."""
INSTALLED = {"site-packages", "dist-packages"}
_OURS = Path(__file__).parents[2]
_LIBRARIES = [sysconfig.get_path("stdlib"), *(str(_OURS / package) for package in ("slimebus", "broker", "rollout", "trainer"))]


def load(path: str, *, base: Path | None = None, arguments: Sequence[str] = ()) -> Callable[..., Any]:
    """The callable at `path`: in a file or module of the folder `base` (that of the run's YAML), or in an installed package.

    The working directory counts only where it is that folder. A hook may import what lies in `base`; what is installed goes first.
    Raises HookError that names the path and what is wrong with it, also when it cannot be called with so many positional `arguments`.
    """
    if base is not None and str(base.resolve()) not in sys.path:
        sys.path.append(str(base.resolve()))
    module_name, colon, name = path.rpartition(":")
    if not colon or not module_name or not name:
        raise HookError(f"hook {path!r}: expected pkg.module:name or file.py:name")
    module = _from_file(path, module_name, base) if module_name.endswith(".py") else _from_package(path, module_name)
    target = getattr(module, name, None)
    if target is None:
        raise HookError(f"hook {path!r}: {module_name} has no {name!r}; it has {', '.join(_public(module)) or 'no public names'}")
    if not callable(target):
        raise HookError(f"hook {path!r}: {name} is a {type(target).__name__}, expected something callable")
    if arguments:
        check_takes(f"hook {path!r}", target, arguments)
    return target  # type: ignore[no-any-return]


def check_takes(name: str, target: Callable[..., Any], arguments: Sequence[str]) -> None:
    """Raise HookError unless it can be called with these positional arguments."""
    with contextlib.suppress(ValueError):  # Python knows no signature of some builtins
        signature = inspect.signature(target)
        try:
            signature.bind(*arguments)
        except TypeError as bad:
            raise HookError(f"{name}: {bad}; it is called with ({', '.join(arguments)})") from None


def _public(module: ModuleType) -> list[str]:
    return [name for name in vars(module) if not name.startswith("_") and callable(getattr(module, name))][:8]


def _from_package(path: str, module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as missing:
        raise HookError(f"hook {path!r}: cannot import {missing.name}; is it installed, or did you mean a file.py:name?") from None
    except (Exception, SystemExit) as bad:  # a plug-in's module may fail in any way
        raise _broken(path, module_name, bad) from bad


def _from_file(path: str, file_name: str, base: Path | None) -> ModuleType:
    file = (base or Path("/")).joinpath(file_name).resolve()
    if not file.is_file() or (base is None and not Path(file_name).is_absolute()):
        raise HookError(f"hook {path!r}: no such file {file}; a relative path begins at the folder of the run.yaml")
    name = f"{FROM_FILE}{file.stem}_{abs(hash(str(file))):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise HookError(f"hook {path!r}: {file} is not Python source")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as bad:  # a plug-in's file may fail in any way
        del sys.modules[name]
        raise _broken(path, str(file), bad) from bad
    return module


def _broken(path: str, where: str, bad: BaseException) -> HookError:
    lines = [f"{frame.f_code.co_filename}:{line}" for frame, line in traceback.walk_tb(bad.__traceback__)]
    return HookError(f"hook {path!r}: {where} failed when loaded, at {lines[-1]}: {type(bad).__name__}: {text_of(bad)}")


def text_of(value: object) -> str:
    """What an exception says, or how any other value prints; short, also when asking for it raises."""
    try:
        text = str(value) if isinstance(value, BaseException) else repr(value)
    except BaseException:  # noqa: BLE001  the plug-in's own class says it
        text = f"(a {type(value).__name__} that cannot be printed)"
    text = text if len(text) <= SHOWN else text[:SHOWN] + "..."
    return text.encode(errors="replace").decode()  # lone surrogates cannot be sent


def user_line(frames: Iterable[tuple[str, int]], *, own: str = "", not_a_file: str = "<") -> str:
    """`FILE:LINE` of the innermost frame that is the user's: of the file `own`, or of no library; empty without one.

    frames: file and line of each, the innermost last. not_a_file: what the names of those begin with that were not read from a file.
    """
    users = [(file, line) for file, line in frames if file == own or not (file.startswith(not_a_file) or _is_library(file))]
    return ":".join(map(str, users[-1])) if users else ""


def _is_library(file: str) -> bool:
    return any(file.startswith(f"{folder}/") for folder in _LIBRARIES) or not INSTALLED.isdisjoint(Path(file).parts)
