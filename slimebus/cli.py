"""The `slimebus` command: a root that loads each subcommand only when it is used, so that --help is instant."""

import importlib
import importlib.metadata
import sys

import click

from slimebus.errors import EXIT_FAILURE, EXIT_USAGE, HookError, ProtocolError, SlimebusError, Unreachable, UsageError

OWN = {
    "config": "slimebus.commands.config:config",
    "eval": "slimebus.commands.evaluate:evaluate",
    "init": "slimebus.commands.init:init",
    "keys": "slimebus.commands.keys:keys",
    "set": "slimebus.commands.set:set_",
    "push": "slimebus.commands.push:push",
    "status": "slimebus.commands.status:status",
    "trace": "slimebus.commands.trace:trace",
    "up": "slimebus.commands.up:up",
    "weights": "slimebus.commands.weights:weights",
}
MISUSE = (UsageError, Unreachable, HookError, ProtocolError)
MISUSE_CODES = ("protocol_version", "usage", "config", "data", "hook")


class Root(click.Group):
    """Finds subcommands by name: slimebus's own, and those that roles register as entry points."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*OWN, *_registered()])

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        target = OWN.get(name) or _registered().get(name)
        if target is None:
            return None
        module, _, attribute = target.partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command


def _registered() -> dict[str, str]:
    return {entry.name: entry.value for entry in importlib.metadata.entry_points(group="slimebus.commands")}


@click.command(cls=Root, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show debug logs, and tracebacks of user errors.")
@click.version_option(package_name="slimebus")
@click.pass_context
def root(ctx: click.Context, debug: bool) -> None:
    """RL post-training of LLMs as ordinary processes on a message bus.

    Start a broker, a trainer and any number of rollout workers, one process per node each, in any order; or
    `slimebus up RUN.yaml` for all of them on this machine.
    """
    ctx.obj = {"debug": debug}


def exit_code(problem: SlimebusError) -> int:
    """2 when the user can mend it by giving something else, else 1."""
    return EXIT_USAGE if isinstance(problem, MISUSE) or problem.code in MISUSE_CODES else EXIT_FAILURE


def main() -> None:
    """Run the command line; a user's mistake is one line and exit code 2, never a traceback (but with --debug)."""
    try:
        code = root.main(standalone_mode=False)  # of ctx.exit; what a command returns otherwise is None
        if isinstance(code, int):
            sys.exit(code)
    except click.ClickException as bad:
        bad.show()
        sys.exit(bad.exit_code)
    except click.Abort:
        sys.exit(130)
    except KeyboardInterrupt:
        sys.exit(130)
    except SlimebusError as bad:
        if "--debug" in sys.argv:
            raise
        click.echo(f"slimebus: {bad.text}", err=True)
        sys.exit(exit_code(bad))
