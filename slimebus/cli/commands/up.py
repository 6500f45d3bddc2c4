"""`slimebus up`: a whole run on one machine."""

import subprocess
import sys
from pathlib import Path

import click

from slimebus.config.flags import META, ConfigCommand, accept_changes_option, config_argument, from_context, trainer_options
from slimebus.config.schema import OPEN_MAPS, flag_of
from slimebus.process.launch import SLIMEBUS


@click.command(cls=ConfigCommand, external=trainer_options)
@config_argument
@click.option("--workers", type=click.IntRange(min=1), default=1, show_default=True, help="[processes] Rollout workers to start.")
@click.option("--critic", is_flag=True, help="Also start a critic, for advantage_estimator ppo.")
@click.option("--teacher", metavar="MODEL", help="[path or URL] Also start a teacher: this model, or the engine that runs there.")
@accept_changes_option
@click.pass_context
def up(ctx: click.Context, run_yaml: Path | None, workers: int, critic: bool, teacher: str | None, accept_changes: bool) -> None:
    """Start broker, trainer and rollout workers of RUN.yaml on this machine, with one log.

    Every line carries the role that wrote it; a terminal also shows the run as it goes, and its result. Ctrl-C ends all of them within 5 s.
    When broker.bind has port 0 a free port is chosen. What `slimebus config check` finds is shown before anything starts. The settings of
    algorithms and corrections are flags too (docs/algorithms.md).
    """
    from slimebus.process.supervisor import Supervisor

    arguments = arguments_of(run_yaml, ctx.meta.get(META, {}))
    # In a process of its own, for it imports hooks.
    check = [*SLIMEBUS, "config", "check", *arguments, *(["--teacher", teacher] if teacher else [])]
    if code := subprocess.run(check, stdout=subprocess.DEVNULL, check=False).returncode:
        sys.exit(code)
    consumers = {"critic": ["trainer", "--role", "critic"]} if critic else {}
    consumers |= {"teacher": ["rollout", "--teacher", teacher]} if teacher else {}
    run = Supervisor(from_context(ctx, run_yaml), arguments, workers=workers, consumers=consumers, accepts_changes=accept_changes)
    sys.exit(run.run())


def arguments_of(run_yaml: Path | None, flags: dict[str, object]) -> list[str]:
    """The same config for a child process, as its command line."""
    words = [str(run_yaml)] if run_yaml else []
    for name, value in flags.items():
        section, _, field = name.rpartition(".")
        flag = f"{section.partition('.')[0]}-{field}".replace("_", "-") if section in OPEN_MAPS else flag_of(name)
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", str(value)]
    return words
