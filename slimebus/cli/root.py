"""The `slimebus` command: a root that loads each subcommand only when it is used, so that --help is instant."""

import importlib
import signal
import sys
import threading

import click

from slimebus.bus.errors import EXIT_FAILURE, EXIT_USAGE, HookError, ProtocolError, SlimebusError, UsageError

COMMANDS = {
    "broker": ("broker.cli:broker", "Run the broker of a run."),
    "buffer": ("broker.inspect.cli:buffer", "Look into a run's buffer, export it, change it."),
    "check-hooks": ("rollout.cli:check_hooks", "Run each hook of a worker on one example."),
    "compare": ("slimebus.cli.commands.sweep:compare", "Compare runs by what their settings differ in."),
    "config": ("slimebus.cli.commands.config:config", "Look at the config of a run."),
    "drain": ("slimebus.cli.commands.engines:drain", "Have a worker hand over its samples and leave."),
    "engines": ("slimebus.cli.commands.engines:engines", "Show, attach and detach the engines of a run."),
    "eval": ("slimebus.cli.commands.evaluate:evaluate", "Evaluate the newest version on the run's workers."),
    "export": ("trainer.cli:export", "Write a checkpoint in Hugging Face layout."),
    "init": ("slimebus.cli.commands.config:init", "Write a commented run.yaml."),
    "keys": ("slimebus.cli.commands.keys:keys", "Make, list, revoke and rotate the keys of a run."),
    "push": ("slimebus.cli.commands.push:push", "Push prompts into a run while it goes on."),
    "rollout": ("rollout.cli:rollout", "Run a rollout worker."),
    "sample": ("rollout.cli:sample", "Rollout alone: the samples of the first prompts, as a folder."),
    "set": ("slimebus.cli.commands.set:set_", "Change settings of a run while it goes on."),
    "simulate": ("broker.simulate.cli:simulate", "Predict throughput, idle time and staleness of a run."),
    "status": ("slimebus.cli.commands.status:status", "Show the step, the reward, every worker and what it waits for."),
    "sweep": ("slimebus.cli.commands.sweep:sweep", "Run the trials of a sweep.yaml, then compare them."),
    "trace": ("slimebus.cli.commands.trace:trace", "Write what trainer and workers did as a timeline."),
    "trainer": ("trainer.cli:trainer", "Run the trainer of a run."),
    "try": ("rollout.cli:try_", "One prompt through template, session, engine and reward."),
    "up": ("slimebus.cli.commands.up:up", "Start a whole run on this machine."),
    "view": ("broker.page.cli:view", "Show a run on a web page."),
    "weights": ("slimebus.cli.commands.weights:weights", "Verify weights as files."),
}
"""Command -> its module and name there, and what `slimebus --help` says of it, for which nothing is imported."""
MISUSE = (UsageError, HookError, ProtocolError)
MISUSE_CODES = ("protocol_version", "usage", "config", "data", "hook", "wrong_run", "name_in_use")

WRONG_PATH = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
"""Of a file that the user named: another path helps."""


class Root(click.Group):
    """Finds subcommands by name, those of slimebus and of the roles, and imports the one that is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(ctx)])


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
