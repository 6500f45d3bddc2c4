"""The `slimebus` command: a root that loads each subcommand only when it is used, so that --help is instant."""

import importlib
import importlib.metadata
import signal
import sys
import threading

import click

from slimebus.bus.errors import EXIT_FAILURE, EXIT_USAGE, HookError, ProtocolError, SlimebusError, Unreachable, UsageError

COMMANDS = {"drain": "engines:drain", "eval": "evaluate:evaluate", "set": "set:set_"} | {
    name: f"{name}:{name}"
    for name in ("compare", "config", "engines", "init", "keys", "push", "status", "sweep", "top", "trace", "up", "weights")
}
"""Command -> module of slimebus.cli.commands, and the command in it."""
OF_ROLES = {
    "view": "broker.page.cli:view",
    "try": "rollout.local_cli:try_",
    "sample": "rollout.local_cli:sample",
    "check-hooks": "rollout.local_cli:check_hooks",
}
"""The same of a role's package, beside those that are registered as entry points."""
MISUSE = (UsageError, Unreachable, HookError, ProtocolError)
MISUSE_CODES = ("protocol_version", "usage", "config", "data", "hook", "wrong_run")

WRONG_PATH = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
"""Of a file that the user named: another path helps."""


class Root(click.Group):
    """Finds subcommands by name: slimebus's own, and those that roles register as entry points."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*COMMANDS, *_registered()])

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        target = f"slimebus.cli.commands.{COMMANDS[name]}" if name in COMMANDS else _registered().get(name)
        if target is None:
            return None
        module, _, attribute = target.partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command


def _registered() -> dict[str, str]:
    return OF_ROLES | {entry.name: entry.value for entry in importlib.metadata.entry_points(group="slimebus.commands")}


@click.command(cls=Root, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show debug logs, and tracebacks of user errors.")
@click.version_option(package_name="slimebus")
@click.pass_context
def root(ctx: click.Context, debug: bool) -> None:
    """RL post-training of LLMs as ordinary processes on a message bus.

    Start a broker, a trainer and any number of rollout workers, one process per node each, in any order; or
    `slimebus up RUN.yaml` for all of them on this machine.
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the command is imported: from here on it ends in its own way
    ctx.obj = {"debug": debug}


def exit_code(problem: SlimebusError) -> int:
    """2 when the user can mend it by giving something else, else 1."""
    return EXIT_USAGE if isinstance(problem, MISUSE) or problem.code in MISUSE_CODES else EXIT_FAILURE


def main() -> None:
    """Run the command line; a user's mistake is one line and exit code 2, never a traceback (but with --debug)."""
    shows_all = "--debug" in sys.argv
    try:
        code = root.main(prog_name="slimebus", standalone_mode=False)  # of ctx.exit; what a command returns otherwise is None
        sys.exit(code if isinstance(code, int) else 0)
    except click.exceptions.NoArgsIsHelpError as bad:
        bad.show()
        sys.exit(bad.exit_code)
    except click.ClickException as bad:
        command = bad.ctx.command_path if isinstance(bad, click.UsageError) and bad.ctx else "slimebus"
        click.echo(f"slimebus: {' '.join(bad.format_message().split())} (`{command} --help`)", err=True)
        sys.exit(bad.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except OSError as bad:
        if shows_all or bad.strerror is None:
            raise
        click.echo(f"slimebus: {bad.filename or 'the system'}: {bad.strerror}", err=True)
        sys.exit(EXIT_USAGE if isinstance(bad, WRONG_PATH) else EXIT_FAILURE)
    except SlimebusError as bad:
        if shows_all:
            raise
        click.echo(f"slimebus: {bad.text}", err=True)
        sys.exit(exit_code(bad))
