"""`slimebus buffer`: look into a run's buffer, export it, change it."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slimebus.bus.errors import EXIT_FAILURE, UsageError
from slimebus.config.flags import RunCommand, RunTarget, asks_broker, of_run
from slimebus.telemetry.formatting import align_columns

if TYPE_CHECKING:
    from broker.inspect.reader import StoreSnapshot
    from broker.state.groups import Group

STATES = ("queued", "leased", "ready", "assigned", "committed", "dropped", "dead")
HEADER = ("group", "state", "failed", "worker", "samples", "tokens", "versions", "reason")
STATE = click.option("--state", "states", multiple=True, type=click.Choice(STATES), help="[choice] Groups in this state; may be repeated.")
REASON = click.option("--reason", "containing", default="", help="[text] Groups with this text in their last reason.")
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group()
def buffer() -> None:
    """Look into what a run holds: groups, samples, dead letters; export and import it, change it.

    Reading needs no broker and does not disturb one: it reads the store under the run directory, on the broker's machine. Changes are made
    by the run's broker, and by a temporary one where none is running.
    """


# --- reading ---


@buffer.command(cls=RunCommand)
@of_run()
@STATE
@REASON
@click.option("--kind", type=click.Choice(["train", "eval"]), help="[choice] Training or evaluation groups only.")
@click.option("--limit", type=click.IntRange(min=1), help="[groups] Show at most so many; default: all.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
def ls(run: RunTarget, states: tuple[str, ...], containing: str, kind: str | None, limit: int | None, as_json: bool) -> None:
    """List groups: state, failures, worker, samples, tokens, versions and the reason of the last move; dead letters with --state dead."""
    from broker.inspect.export import summary_of

    with _snapshot(run) as snapshot:
        chosen = (group for group in _choose_groups(snapshot, (), states, containing) if kind in (None, group.kind))
        found = sorted(chosen, key=lambda group: (group.kind, group.position, group.id))
    if as_json:
        for group in found[:limit]:
            click.echo(json.dumps({"group": group.id, **summary_of(group)}))
        return
    for line in align_columns([_row_of(group) for group in found[:limit]], HEADER):
        click.echo(line)
    counts = {state: sum(g.phase == state for g in found) for state in STATES}
    click.echo(f"{len(found)} groups: {_count_states(counts)}", err=True)


@buffer.command(cls=RunCommand)
@of_run("[GROUP]...")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a group, with its arrays.")
@click.option("--ids", "as_ids", is_flag=True, help="Show token ids instead of text.")
def show(run: RunTarget, as_json: bool, as_ids: bool) -> None:
    """Show groups with their prompt and samples: reward, versions, and text where the RUN.yaml names a model, else token ids."""
    from broker.inspect.show import as_object, in_lines, text_of

    if not run.names:
        raise UsageError("show: no GROUP given; `slimebus buffer ls` lists them")
    decode = None if as_ids or as_json else text_of(run.resolved)
    with _snapshot(run) as snapshot:
        for name in run.names:
            group = snapshot.group(name)
            if as_json:
                click.echo(json.dumps(as_object(snapshot, group)))
            else:
                click.echo("\n".join(in_lines(snapshot, group, decode)))


@buffer.command(cls=RunCommand)
@of_run("[GROUP]...")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="[path] Folder to write; it must not exist. Required.")
@STATE
@REASON
def export(run: RunTarget, out: Path, states: tuple[str, ...], containing: str) -> None:
    """Write groups with their prompts and samples to a folder: the GROUPs given, those in a state, or all.

    groups.jsonl has one group a line, safetensors files have the arrays, named GROUP/SAMPLE/FIELD; `import` takes them in again. Groups
    with damaged records are left out and named; the exit code is then 1.
    """
    from broker.inspect.export import export_groups

    with _snapshot(run) as snapshot:
        done = export_groups(snapshot, _choose_groups(snapshot, run.names, states, containing, every=True), out)
        num_freed = snapshot.num_freed_steps()
    click.echo(f"{done.groups} groups, {done.samples} samples written to {out}")
    if num_freed and "committed" in states:
        kept = run.resolved.run_dir / "samples"
        use = f"the newest are in {kept}" if kept.is_dir() else f"with trainer.dump_samples the trainer keeps the newest in {kept}"
        why = f"samples of the {num_freed} steps before step {num_freed} are freed, for every checkpoint kept is of a later step"
        click.echo(f"{why}; {use}, which `slimebus trainer --replay` takes, too", err=True)
    for name, why in done.left_out.items():
        click.echo(f"left out group {name}: {why}", err=True)
    sys.exit(EXIT_FAILURE if done.left_out else 0)


@buffer.command(cls=RunCommand)
@of_run()
@click.option("--out", required=True, type=click.Path(path_type=Path), help="[path] Folder to write; it must not exist. Required.")
def backup(run: RunTarget, out: Path) -> None:
    """Copy the store as it is at one moment, while its broker works, to OUT/broker.

    `slimebus buffer verify --run-dir OUT` checks the copy. To restore it, stop the broker and put that folder in place of RUN_DIR/broker;
    docs/run.md says what that costs.
    """
    from broker.store import KINDS
    from slimebus.telemetry.formatting import format_size

    if out.exists():
        raise UsageError(f"backup: {out} exists; give a folder that does not")
    kind, copied = KINDS[run.resolved.config.broker.durability], out / "broker"
    click.echo(f"{format_size(kind.copy(run.resolved.run_dir / 'broker', copied))} written to {copied}")


@buffer.command(cls=RunCommand)
@of_run()
@JSON
def verify(run: RunTarget, as_json: bool) -> None:
    """Read every record, in a process of its own, and check it: checksums, forms, and that groups, prompts, samples and steps fit together.

    Exit code 1 when something is wrong; each problem is one line.
    """
    import msgspec

    from broker.inspect.verify import verify_run

    report = verify_run(run.resolved.run_dir, run.resolved.config.broker.durability)
    if as_json:
        click.echo(msgspec.json.encode(report).decode())
    else:
        for problem in report.problems:
            click.echo(problem)
        what = f"{len(report.problems)} problems" if report.problems else "ok"
        click.echo(f"{what}: {sum(report.counts.values())} records, {report.size_bytes} bytes read; groups: {_count_states(report.states)}")
    sys.exit(EXIT_FAILURE if report.problems else 0)


# --- changing ---


@buffer.command(cls=RunCommand)
@of_run("[GROUP]...")
@asks_broker(30.0, "the one that has the run's store open")
@JSON
@STATE
@REASON
@click.option("--why", default="", help="[text] Kept and counted as the reason.")
def drop(run: RunTarget, states: tuple[str, ...], containing: str, why: str, **how: Any) -> None:
    """Take groups out of the run: those given, or all that --state and --reason choose. Their prompts are not trained.

    One that is part of a batch is dropped once the trainer rejects it, or goes back before that step.
    """
    _edit("drop", run, states, containing, why, **how)


@buffer.command(cls=RunCommand)
@of_run("[GROUP]...")
@asks_broker(30.0, "the one that has the run's store open")
@JSON
@click.option("--state", "states", multiple=True, type=click.Choice(["dead", "dropped"]), help="[choice] All groups that ended so.")
@REASON
def replay(run: RunTarget, states: tuple[str, ...], containing: str, **how: Any) -> None:
    """Try dead or dropped groups again: their prompts are queued, their failed attempts forgotten."""
    _edit("replay", run, states, containing, "", **how)


@buffer.command("import", cls=RunCommand)
@of_run("PATH...")
@asks_broker(30.0, "the one that has the run's store open")
@JSON
@click.option("--prompts-only", is_flag=True, help="Leave the samples out: the prompts are sampled by this run.")
def import_(run: RunTarget, prompts_only: bool, broker: str | None, timeout_s: float, as_json: bool) -> None:
    """Take in groups from folders that export wrote, or prompts from plain jsonl files. Their ids begin with import/.

    Samples that this run could have made, and those that no policy made, are ready to be trained; of others the prompt is sampled again.
    Importing it again changes nothing.
    """
    from broker.inspect.changes import open_editor
    from broker.inspect.export import read_groups

    if not run.names:
        raise UsageError("import: no PATH given; expected a folder that `slimebus buffer export` wrote, or a jsonl file of prompts")
    done: dict[str, str] = {}
    with open_editor(run.resolved, run.file, broker, timeout_s) as editor:
        for name in run.names:
            for group in read_groups(Path(name), prompts_only=prompts_only):
                done.update(editor.edit(group.message, group.frames).done)
    _print_outcome(done, {}, as_json=as_json)


# --- what the commands share ---


def _edit(
    action: str, run: RunTarget, states: tuple[str, ...], containing: str, why: str, *, broker: str | None, timeout_s: float, as_json: bool
) -> None:
    from broker.inspect.changes import open_editor

    chooses = bool(states or containing)
    if not (run.names or chooses):
        raise UsageError(f"{action}: no GROUP given; name some, or choose with --state or --reason")
    wanted = list(run.names)
    if chooses or broker is None:
        able = {"replay": ("dead", "dropped"), "drop": ("queued", "leased", "ready", "dead")}[action]
        with _snapshot(run) as snapshot:
            for name in run.names:
                snapshot.group(name)  # a wrong name is reported with the nearest ones before anything changes
            wanted += [group.id for group in _choose_groups(snapshot, (), states or able, containing)] if chooses else []
    with open_editor(run.resolved, run.file, broker, timeout_s) as editor:
        reply = editor.edit_all(action, wanted, why)
    _print_outcome(reply.done, reply.refused, as_json=as_json)


def _print_outcome(done: dict[str, str], refused: dict[str, str], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"done": done, "refused": refused}))
    else:
        for name, result in done.items():
            click.echo(f"{name}: {result}")
        for name, reason in refused.items():
            click.echo(f"{name}: refused: {reason}", err=True)
        click.echo(f"{len(done)} groups done, {len(refused)} refused", err=True)
    sys.exit(EXIT_FAILURE if refused else 0)


def _snapshot(run: RunTarget) -> Any:
    from broker.inspect.reader import open_snapshot

    return open_snapshot(run.resolved.run_dir, run.resolved.config.broker.durability)


def _choose_groups(
    snapshot: "StoreSnapshot", names: tuple[str, ...], states: tuple[str, ...], containing: str, *, every: bool = False
) -> "Iterator[Group]":
    """The groups named, or those in these states with a text in their reason. every: leave out those of evaluations."""
    if names:
        yield from (snapshot.group(name) for name in names)
        return
    for group in snapshot.groups(states):
        if containing in group.reason and not (every and group.kind == "eval"):
            yield group


def _row_of(group: "Group") -> tuple[object, ...]:
    state = group.phase + (f" {group.step}" if group.step >= 0 else "")
    versions = f"{group.oldest_version}..{group.newest_version}" if group.newest_version >= 0 else ""
    sizes = (group.num_samples or "", group.num_tokens or "")
    return group.id, state, group.failures, group.lease.worker, *sizes, versions, group.reason


def _count_states(states: dict[str, int]) -> str:
    return ", ".join(f"{count} {state}" for state, count in states.items() if count) or "none"
