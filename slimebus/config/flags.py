"""Every config field as a flag of a command, shown by section in its help."""

import difflib
import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, get_origin

import click
import msgspec

from slimebus.bus.errors import UsageError
from slimebus.config.convert import other_names
from slimebus.config.load import Resolved, resolve
from slimebus.config.schema import flag_of, paths, sections

META = "slimebus.flags"
SIMILAR = 0.8
"""Of two names, by difflib: below it nothing is suggested."""
MISSPELLED = 0.9
"""Of a name and one of slimebus's options: from here on it is taken for that one misspelled, and not for an option of Megatron's; of those
none is so near (0.875 at most).
"""
LONGEST_WAIT_S = 86_400
"""The longest --timeout-s."""
OF_RUN = "that of the run directory, else broker.bind"
"""Which broker a command asks where none is given."""


class ExternalOption(msgspec.Struct, frozen=True):
    """An option of another project: the config field `name`, and its value where it stands alone."""

    name: str
    alone: str = "true"


class ExternalOptions(Protocol):
    """The options of another project that a command takes beside the config fields."""

    def option(self, name: str) -> ExternalOption | None:
        """What `--name` sets, if there is such an option, which `problems` judges; None where there can be none. Raises UsageError."""

    def problems(self, resolved: Resolved) -> Sequence[str]:
        """A sentence for each of these options that is wrong in this config."""


class ConfigCommand(click.Command):
    """A command that takes a RUN.yaml and any config field as a flag.

    external: gives the options of another project; asked only when one is used. problems: what only the role of this command can find in a
    config, a sentence each (`slimebus config check` asks it too).
    """

    fields: Collection[str] | None = None
    """The config fields that are flags; None: all."""
    prefixes: Mapping[str, str] = {"sglang-": "sglang", "router-": "router", "megatron-": "megatron", "algorithm-": "algorithm.settings"}
    """What flags begin with in a section with keys of another project."""

    def __init__(
        self, name: str | None, *, external: Callable[[], ExternalOptions | None] = lambda: None,
        problems: Callable[[Resolved], list[str]] | None = None, **kw: Any,
    ) -> None:  # fmt: skip
        kw["params"] = [*kw.get("params", []), *(_option(*flag) for flag in _flags(self.fields).items())]
        super().__init__(name, **kw)
        self.external, self.problems = external, problems

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own, rest = [], list(args)
        while rest:
            word = rest.pop(0)
            values = _values_of(word, rest)
            self._refuse_other_name(ctx, word)
            option = self.external_option(word, is_alone=not values)
            if option is None:
                own.append(word)
            else:
                ctx.meta.setdefault(META, {})[option.name] = ",".join(values) if values else option.alone
                del rest[: 0 if "=" in word else len(values)]
        try:
            return super().parse_args(ctx, own)
        except click.NoSuchOption as bad:
            name = bad.option_name.removeprefix("--").replace("-", "_")
            near = [f"--{flag}" for flag, field in _flags(self.fields).items() if field == name]
            near += difflib.get_close_matches(bad.option_name, bad.possibilities or [], cutoff=SIMILAR)
            meant = " or ".join(f"'{flag}'" for flag in dict.fromkeys(near))
            text = f"No such option '{bad.option_name}'.{f' Did you mean {meant}?' if meant else ''}"
            raise click.NoSuchOption(bad.option_name, text, ctx=ctx) from None  # its own possibilities are only those spelled alike

    def _refuse_other_name(self, ctx: click.Context, word: str) -> None:
        """Raise NoSuchOption, with what to write, for a flag of slime, verl or TRL that means something else here or nothing."""
        name = word.partition("=")[0].removeprefix("--")
        if word.startswith("--") and (here := other_names().get(name)) and f"--{name}" not in {one for p in self.params for one in p.opts}:
            raise click.NoSuchOption(f"--{name}", f"No such option '--{name}'. Here: {here}", ctx=ctx)

    def external_option(self, word: str, *, is_alone: bool = False) -> ExternalOption | None:
        """The option of another project that this word of the command line may be; None for any other word. is_alone: no value follows."""
        option = word.partition("=")[0]
        name, own = option.removeprefix("--"), {"--help", *(one for p in self.params for one in p.opts)}
        if name == option or name.removeprefix("no-") in _flags() or option in own:
            return None
        prefix = next((one for one in self.prefixes if name.startswith(one)), "")
        section, key = self.prefixes.get(prefix), name.removeprefix(prefix)
        is_off = is_alone and key.startswith("no-") and section in (None, "megatron")
        key = key.removeprefix("no-") if is_off else key
        if section:
            found: ExternalOption | None = ExternalOption(f"{section}.{key.replace('-', '_')}")
        else:
            options = self.external()
            found = options.option(key) if options else None
            if found and found.name.startswith("megatron.") and difflib.get_close_matches(option, own, 1, MISSPELLED):
                return None
        return ExternalOption(found.name, "false") if found and is_off else found

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

    fields: Collection[str] = ("name", "run_dir", "security.keys")
    prefixes: Mapping[str, str] = {}


def _flags(chosen: Collection[str] | None = None) -> dict[str, str]:
    """Flag without dashes -> dotted name of the config field."""
    names = (name for name in paths() if name != "eval.datasets" and (chosen is None or name in chosen))
    return {flag_of(name): name for name in names}


def _option(flag: str, name: str) -> click.Option:
    is_switch, is_list = paths()[name].type is bool, get_origin(paths()[name].type) is list

    def remember(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        if value or (value is not None and not is_list):  # a list's flag may be repeated, each with one or several values
            ctx.meta.setdefault(META, {})[name] = ",".join(value) if is_list else value

    variable = name.replace(".", "__")
    names = [f"--{flag}/--no-{flag}" if is_switch else f"--{flag}", variable]
    return click.Option(names, default=None, multiple=is_list, hidden=True, expose_value=False, callback=remember)


def _values_of(word: str, rest: Sequence[str]) -> list[str]:
    """The words that are values of this one, where it is an option of another project: those up to the next option, or the RUN.yaml."""
    _, equals, value = word.partition("=")
    return [value] if equals else list(itertools.takewhile(lambda other: not other.startswith("--") and not is_run_file(other), rest))


def is_run_file(word: str) -> bool:
    """Whether a word of a command line is the RUN.yaml."""
    return word.endswith((".yaml", ".yml"))


def trainer_command() -> ConfigCommand | None:
    """The trainer's command, with flags and checks that others share; None where no trainer is installed."""
    from slimebus.cli.root import root

    command = root.get_command(click.Context(root), "trainer")
    return command if isinstance(command, ConfigCommand) else None


def trainer_options() -> ExternalOptions | None:
    """What the trainer's command takes besides: flags of the algorithms and of megatron-core; None where no trainer is installed."""
    command = trainer_command()
    return command.external() if command is not None else None


def from_context(ctx: click.Context, file: Path | None) -> Resolved:
    """The config of the running command: its RUN.yaml, its flags, the environment."""
    return resolve(file, ctx.meta.get(META, {}))


def split_words(words: tuple[str, ...]) -> tuple[Path | None, tuple[str, ...]]:
    """The RUN.yaml, where the first word is one, or the last, and the other words."""
    if words and is_run_file(words[0]):
        return Path(words[0]), words[1:]
    if words and is_run_file(words[-1]):
        return Path(words[-1]), words[:-1]
    return None, words


class RunTarget(NamedTuple):
    """The run that a command is about, and the words after its RUN.yaml."""

    file: Path | None
    resolved: Resolved
    names: tuple[str, ...]


def of_run(names: str = "", count: int | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command gets the run of its RUN.yaml and flags as `run`. names: what further words are, `count` of them where that is given."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def with_run(words: tuple[str, ...], **own: Any) -> None:
            file, others = split_words(words)
            if others and not names:
                raise UsageError(f"{others[0]!r} is not a RUN.yaml; this command takes no other word")
            if count not in (None, len(others)):
                raise UsageError(f"got {' '.join(others) or 'nothing'}; expected {names}")
            command(RunTarget(file, from_context(click.get_current_context(), file), others), **own)

        return click.argument("words", nargs=-1, metavar=f"[RUN.yaml] {names}".strip())(with_run)

    return decorate


def asks_broker(timeout_s: float, default: str = OF_RUN) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command gets the options `broker` and `timeout_s`."""
    broker = click.option("--broker", help=f"[address] Of the broker, tcp://HOST:PORT; default: {default}.")
    help_ = "[seconds] How long to wait for the broker."
    timeout = click.option("--timeout-s", default=timeout_s, show_default=True, callback=_seconds, help=help_)
    return lambda command: broker(timeout(command))


def _seconds(_context: click.Context, _option: click.Parameter, value: float) -> float:
    if not 0 <= value <= LONGEST_WAIT_S:  # nan neither
        raise click.BadParameter(f"{value:g}; expected seconds, from 0 to {LONGEST_WAIT_S}")
    return value


def take_over_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """--take-over of a command that joins a run."""
    return click.option("--take-over", is_flag=True, help="Replace a living process of this name; without it, one is left in place.")(
        function
    )


def accept_changes_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """--accept-changes of a command that starts a run's broker."""
    help_ = "Resume a run although its reward, generation, chat template or initial model changed since its last start."
    return click.option("--accept-changes", is_flag=True, help=help_)(function)


def config_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """The RUN.yaml argument of a command."""
    return click.argument("run_yaml", type=click.Path(path_type=Path), required=False)(function)
