"""Every config field as a flag of a command, shown by section in its help."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, get_origin

import click

from slimebus.cli.config.fields import sections
from slimebus.cli.config.load import Resolved, resolve
from slimebus.cli.config.schema import paths

META = "slimebus.flags"
ForeignFlags = Callable[[], Mapping[str, str]]
"""Gives flag -> dotted config name for the options of another project (megatron-core)."""


class ConfigCommand(click.Command):
    """A command that takes a RUN.yaml and any config field as a flag.

    foreign: exact flags of another project, asked for only when one is used. problems: what only the role of this command can find in a
    config, a sentence each (`slimebus config check` asks it too).
    """

    fields: Collection[str] | None = None
    """The config fields that are flags; None: all."""
    prefixes: Mapping[str, str] = {"sglang-": "sglang", "megatron-": "megatron", "algorithm-": "algorithm.settings"}
    """What the flags of a section begin with whose keys belong to another project."""

    def __init__(
        self, name: str | None, *, foreign: ForeignFlags | None = None, problems: Callable[[Resolved], list[str]] | None = None, **kw: Any
    ) -> None:
        kw["params"] = [*kw.get("params", []), *(_option(*flag) for flag in _flags(self.fields).items())]
        super().__init__(name, **kw)
        self.foreign, self.problems = foreign, problems

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own, rest = [], list(args)
        while rest:
            word = rest.pop(0)
            name = self._foreign_name(word)
            if name is None:
                own.append(word)
                continue
            _, equals, value = word.partition("=")
            if not equals:
                value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
            ctx.meta.setdefault(META, {})[name] = value
        return super().parse_args(ctx, own)

    def _foreign_name(self, word: str) -> str | None:
        option = word.partition("=")[0]
        flag = option.removeprefix("--")
        if flag == option or flag.removeprefix("no-") in _flags() or any(option in p.opts for p in self.params):
            return None
        for prefix, section in self.prefixes.items():
            if flag.startswith(prefix):
                return f"{section}.{flag.removeprefix(prefix).replace('-', '_')}"
        return self.foreign().get(flag) if self.foreign else None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        flags = {name: flag for flag, name in _flags(self.fields).items()}
        for name, _, docs in sections():
            rows = [(f"--{flags[d.name]}", f"[{d.unit}] {d.meaning} (default {d.default})") for d in docs if d.name in flags]
            if rows:
                with formatter.section(f"Config: {name or 'run'}"):
                    formatter.write_dl(rows)


class RunCommand(ConfigCommand):
    """A command about a run that exists: it takes a RUN.yaml and the flags that say which run is meant and with which key."""

    fields = ("name", "run_dir", "security.keys")
    prefixes: Mapping[str, str] = {}


def _flags(chosen: Collection[str] | None = None) -> dict[str, str]:
    """Flag without dashes -> dotted name of the config field."""
    names = (name for name in paths() if name != "eval.datasets" and (chosen is None or name in chosen))
    return {name.rpartition(".")[2].replace("_", "-"): name for name in names}


def _option(flag: str, name: str) -> click.Option:
    is_switch, is_list = paths()[name].type is bool, get_origin(paths()[name].type) is list

    def remember(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        if value or (value is not None and not is_list):  # a list's flag may be repeated, each with one or several values
            ctx.meta.setdefault(META, {})[name] = ",".join(value) if is_list else value

    variable = name.replace(".", "__")
    names = [f"--{flag}/--no-{flag}" if is_switch else f"--{flag}", variable]
    return click.Option(names, default=None, multiple=is_list, hidden=True, expose_value=False, callback=remember)


def trainer_command() -> ConfigCommand | None:
    """The trainer's command, whose flags and checks others share; None where no trainer is installed."""
    from slimebus.cli.root import root

    command = root.get_command(click.Context(root), "trainer")
    return command if isinstance(command, ConfigCommand) else None


def trainer_flags() -> Mapping[str, str]:
    """What the trainer's command takes besides: flags of the algorithms and of megatron-core; none where no trainer is installed."""
    command = trainer_command()
    return command.foreign() if command is not None and command.foreign is not None else {}


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
