"""Every config field as a flag of a command, shown by section in its help."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from slimebus.config.fields import FieldDoc, sections
from slimebus.config.load import Resolved, resolve
from slimebus.config.schema import paths

META = "slimebus.flags"
PREFIXES = {"sglang-": "sglang", "megatron-": "megatron"}
ForeignFlags = Callable[[], Mapping[str, str]]
"""Gives flag -> dotted config name for the options of another project (megatron-core)."""


class ConfigCommand(click.Command):
    """A command that takes a RUN.yaml and any config field as a flag.

    prefixes: start of foreign flags -> the open map of the config that takes them, PREFIXES unless given.
    foreign: exact foreign flags, asked for only when one is used.
    """

    def __init__(
        self, name: str | None, *, prefixes: Mapping[str, str] | None = None, foreign: ForeignFlags | None = None, **kw: Any
    ) -> None:
        kw["params"] = [*kw.get("params", []), *_options()]
        super().__init__(name, **kw)
        self.prefixes, self.foreign = dict(PREFIXES if prefixes is None else prefixes), foreign

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own, i = [], 0
        while i < len(args):
            name = self._foreign_name(args[i])
            if name is None:
                own.append(args[i])
            else:
                _, equals, value = args[i].partition("=")
                if not equals:
                    has_value = i + 1 < len(args) and not args[i + 1].startswith("--")
                    value = args[i + 1] if has_value else "true"
                    i += has_value
                ctx.meta.setdefault(META, {})[name] = value
            i += 1
        return super().parse_args(ctx, own)

    def _foreign_name(self, word: str) -> str | None:
        flag = word[2:].partition("=")[0]
        if not word.startswith("--") or flag.removeprefix("no-") in _by_flag():
            return None
        for prefix, section in self.prefixes.items():
            if flag.startswith(prefix):
                return f"{section}.{flag.removeprefix(prefix).replace('-', '_')}"
        if self.foreign is None or any(word.partition("=")[0] in p.opts for p in self.params):
            return None
        return self.foreign().get(flag)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        for name, _, docs in sections():
            rows = [(d.flag, f"[{d.unit}] {d.meaning} (default {d.default})") for d in docs if _is_flag(d)]
            if rows:
                with formatter.section(f"Config: {name or 'run'}"):
                    formatter.write_dl(rows)


def _is_flag(doc: FieldDoc) -> bool:
    return doc.name not in ("megatron", "sglang", "eval.datasets")


def _by_flag() -> dict[str, str]:
    return {doc.flag[2:]: doc.name for _, _, docs in sections() for doc in docs if _is_flag(doc)}


def _options() -> list[click.Parameter]:
    kinds = {name: field.type for name, field in paths().items()}
    return [_option(flag, name, kinds[name] is bool) for flag, name in _by_flag().items()]


def _option(flag: str, name: str, is_switch: bool) -> click.Option:
    def remember(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        if value is not None:
            ctx.meta.setdefault(META, {})[name] = value

    variable = name.replace(".", "__")
    names = [f"--{flag}/--no-{flag}" if is_switch else f"--{flag}", variable]
    return click.Option(names, default=None, hidden=True, expose_value=False, callback=remember)


def from_context(ctx: click.Context, file: Path | None) -> Resolved:
    """The config of the running command: its RUN.yaml, its flags, the environment."""
    return resolve(file, ctx.meta.get(META, {}))


def split_words(words: tuple[str, ...]) -> tuple[Path | None, tuple[str, ...]]:
    """The RUN.yaml, where the first word is one, and the other words."""
    if words and words[0].endswith((".yaml", ".yml")):
        return Path(words[0]), words[1:]
    return None, words


def config_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """The RUN.yaml argument of a command."""
    return click.argument("run_yaml", type=click.Path(path_type=Path), required=False)(function)
