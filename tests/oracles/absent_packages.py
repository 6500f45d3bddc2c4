"""Stands in for the packages that a wheel imports and its formulas do not use: any module, and any name in it as an empty class."""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class AbsentName(type):
    """A class that may be derived from, called, used as a decorator, and asked for any attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return AbsentName(name, (), {})

    def __call__(cls, *args: Any, **options: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else super().__call__()


class AbsentModule(ModuleType):
    """A module, and a package, with any name in it."""

    __version__ = "0"
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return AbsentName(name, (), {})


class AbsentPackages:
    """Finds modules of these packages, where nothing else does."""

    def __init__(self, packages: set[str]) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self.packages else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def stand_in(*packages: str) -> None:
    """For those of these packages that are not installed."""
    sys.meta_path.append(AbsentPackages({name for name in packages if importlib.util.find_spec(name) is None}))  # type: ignore[arg-type]
