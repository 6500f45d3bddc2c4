"""`slimebus buffer`: look into a run's buffer, save it, change it."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from slimebus.config.flags import split_words
from slimebus.errors import EXIT_FAILURE, UsageError

if TYPE_CHECKING:
    from broker.buffer.reader import Moment
    from broker.state.groups import Group
    from slimebus.config import Resolved

STATES = ("queued", "leased", "ready", "assigned", "committed", "dropped", "dead")
WORDS = click.argument("words", nargs=-1, metavar="[RUN.yaml] [GROUP]...")
RUN_YAML = click.argument("words", nargs=-1, metavar="[RUN.yaml]")
RUN_DIR = click.option("--run-dir", help="[path] Of the run, or of a backup; default: that of the RUN.yaml.")
BROKER = click.option("--broker", help="[address] Of the broker, tcp://HOST:PORT; default: the one that has the run's store open.")
KEYS = click.option("--keys", help="[path] Folder of keys, or one key file; default: security.keys of the config.")
KEY_NAME = click.option("--key-name", help="[name] Which key of that folder; default: the only one of role client.")
STATE = click.option("--state", "states", multiple=True, type=click.Choice(STATES), help="[choice] Groups in this state; may be repeated.")
REASON = click.option("--reason", "containing", default="", help="[text] Groups whose last reason contains this.")
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
TIMEOUT = click.option("--timeout-s", default=30.0, show_default=True, help="[seconds] How long to wait for the broker.")


@click.group(short_help="Look into a run's buffer, save it, change it.")
def buffer() -> None:
    """Look into what a run holds: groups, samples, dead letters; save it, bring it back, change it.

    Reading needs no broker and does not disturb one: it reads the store under the run directory, on the broker's machine. Changes are made
    by the run's broker, and by one started for the moment where none is running.
    """


# --- reading ---


@buffer.command()
@RUN_YAML
@RUN_DIR
@STATE
@REASON
@click.option("--kind", type=click.Choice(["train", "eval"]), help="[choice] Training or evaluation groups only.")
@click.option("--limit", type=click.IntRange(min=1), help="[groups] Show at most so many; default: all.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
def ls(
    words: tuple[str, ...],
    run_dir: str | None,
    states: tuple[str, ...],
    containing: str,
    kind: str | None,
    limit: int | None,
    as_json: bool,
) -> None:
    """List groups: state, attempt, worker, samples, tokens, versions and the reason of the last move; dead letters with --state dead."""
    from broker.buffer.export import about_of

    _run_dir(words, run_dir)
    with _moment(words, run_dir) as moment:
        found = sorted(
            (g for g in _chosen(moment, (), states, containing) if kind in (None, g.kind)), key=lambda g: (g.kind, g.position, g.id)
        )
    rows = [{"group": g.id, **about_of(g)} for g in found[:limit]]
    if as_json:
        for row in rows:
            click.echo(json.dumps(row))
        return
    for line in _table([_listed(row) for row in rows]):
        click.echo(line)
    counts = {state: sum(g.phase == state for g in found) for state in STATES}
    click.echo(f"{len(found)} groups: {', '.join(f'{n} {state}' for state, n in counts.items() if n) or 'none'}", err=True)


@buffer.command()
@WORDS
@RUN_DIR
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a group, with its arrays.")
@click.option("--ids", "as_ids", is_flag=True, help="Show token ids instead of text.")
def show(words: tuple[str, ...], run_dir: str | None, as_json: bool, as_ids: bool) -> None:
    """Show groups with their prompt and samples: reward, versions, and text where the RUN.yaml names a model, else token ids."""
    from broker.buffer.show import as_object, in_lines, text_of

    file, names = split_words(words)
    if not names:
        raise UsageError("show: no GROUP given; `slimebus buffer ls` lists them")
    resolved = _resolved(file, _given(run_dir))
    decode = None if as_ids or as_json else text_of(resolved)
    with _moment(words, run_dir) as moment:
        for name in names:
            group = moment.group(name)
            if as_json:
                click.echo(json.dumps(as_object(moment, group)))
            else:
                click.echo("\n".join(in_lines(moment, group, decode)))


@buffer.command()
@WORDS
@RUN_DIR
@click.option("--out", required=True, type=click.Path(path_type=Path), help="[path] File to write, .jsonl or .safetensors. Required.")
@STATE
@REASON
@click.option("--format", "kind", default="", type=click.Choice(["", "jsonl", "safetensors"]), help="[choice] Default: by the file's name.")
def export(words: tuple[str, ...], run_dir: str | None, out: Path, states: tuple[str, ...], containing: str, kind: str) -> None:
    """Write groups with their prompts and samples to a file: the GROUPs given, those in a state, or all.

    jsonl has one sample a line, with its arrays; safetensors has arrays named GROUP/SAMPLE/FIELD. Both can be imported again. Groups
    whose records are damaged are left out and named; the exit code is then 1.
    """
    from broker.buffer.export import export_jsonl, export_safetensors, writer_of

    kind = writer_of(out, kind)
    _, names = split_words(words)
    partial = out.with_name(out.name + ".partial")
    with _moment(words, run_dir) as moment:
        groups = _chosen(moment, names, states, containing, every=True)
        try:
            if kind == "jsonl":
                with partial.open("wb") as file:
                    done = export_jsonl(moment, groups, file)
            else:
                done = export_safetensors(moment, groups, partial)
            partial.replace(out)
        except OSError as bad:
            raise UsageError(f"cannot write {out}: {bad}") from None
    click.echo(f"{done.groups} groups, {done.samples} samples written to {out}")
    for name, why in done.left_out.items():
        click.echo(f"left out group {name}: {why}", err=True)
    sys.exit(EXIT_FAILURE if done.left_out else 0)


@buffer.command()
@RUN_YAML
@RUN_DIR
@JSON
def verify(words: tuple[str, ...], run_dir: str | None, as_json: bool) -> None:
    """Read every record and check it: pages, checksums, forms, and that groups, prompts, samples and steps fit together.

    Exit code 1 when something is wrong; each problem is one line.
    """
    import msgspec

    from broker.buffer.verify import verify as look

    _run_dir(words, run_dir)
    with _moment(words, run_dir) as moment:
        report = look(moment)
    if as_json:
        click.echo(msgspec.json.encode(report).decode())
    else:
        for problem in report.problems:
            click.echo(problem)
        what = f"{len(report.problems)} problems" if report.problems else "ok"
        click.echo(f"{what}: {sum(report.counts.values())} records, {report.size_bytes} bytes read; groups: {_counted(report.states)}")
    sys.exit(EXIT_FAILURE if report.problems else 0)


# --- saving ---


@buffer.command()
@RUN_YAML
@RUN_DIR
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="[path] Folder to write; itself a --run-dir afterwards. Required."
)
@JSON
def backup(words: tuple[str, ...], run_dir: str | None, out: Path, as_json: bool) -> None:
    """Copy the store, as it is at one moment, to a folder, while the broker goes on."""
    from broker.buffer.backup import back_up

    about = back_up(_run_dir(words, run_dir), out)
    click.echo(json.dumps(about) if as_json else f"{out}: run {about['run']!r} at step {about['step']}, {about['groups']} groups")


@buffer.command()
@RUN_YAML
@RUN_DIR
@click.option("--backup", "source", required=True, type=click.Path(path_type=Path), help="[path] Folder that backup wrote. Required.")
@JSON
def restore(words: tuple[str, ...], run_dir: str | None, source: Path, as_json: bool) -> None:
    """Make the store of a run directory from a backup. A store that is there is set aside; no broker may have it open."""
    from broker.buffer.backup import restore as bring_back

    target = _run_dir(words, run_dir)
    about = bring_back(source, target)
    if as_json:
        click.echo(json.dumps(about))
        return
    click.echo(f"{target}: run {about['run']!r} at step {about['step']}, {about['groups']} groups; start its broker to go on")
    if about["set_aside"]:
        click.echo(f"the store that was there is now {about['set_aside']}")


# --- changing ---


class Wish(NamedTuple):
    """How a command reaches the broker that changes the run, and how it says what came of it."""

    given: dict[str, str]
    broker: str | None
    as_json: bool
    timeout_s: float


def changes(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of those that change a run; it gets them as one `wish`."""

    @functools.wraps(command)
    def ask(
        run_dir: str | None, broker: str | None, keys: str | None, key_name: str | None, as_json: bool, timeout_s: float, **own: Any
    ) -> None:
        command(wish=Wish(_given(run_dir, keys, key_name), broker, as_json, timeout_s), **own)

    for option in (TIMEOUT, JSON, KEY_NAME, KEYS, BROKER, RUN_DIR):
        option(ask)
    return ask


@buffer.command()
@WORDS
@changes
@STATE
@REASON
@click.option("--why", default="", help="[text] Kept and counted as the reason.")
def drop(wish: Wish, words: tuple[str, ...], states: tuple[str, ...], containing: str, why: str) -> None:
    """Take groups out of the run: those given, or all that --state and --reason choose. Their prompts are not trained.

    Queued, leased, ready and dead groups can be dropped; one that is part of a batch belongs to the trainer.
    """
    _edit("drop", words, wish, states, containing, why)


@buffer.command()
@WORDS
@changes
@click.option("--state", "states", multiple=True, type=click.Choice(["dead", "dropped"]), help="[choice] All groups that ended so.")
@REASON
def replay(wish: Wish, words: tuple[str, ...], states: tuple[str, ...], containing: str) -> None:
    """Try dead or dropped groups again: their prompts are queued, their failed attempts forgotten."""
    _edit("replay", words, wish, states, containing)


@buffer.command("import")
@click.argument("words", nargs=-1, metavar="[RUN.yaml] FILE...")
@changes
@click.option("--prompts-only", is_flag=True, help="Leave the samples out: the prompts are sampled by this run.")
@click.option("--as-version", type=click.IntRange(min=0), help="[version] Count the samples as made by this version of the run.")
def import_(wish: Wish, words: tuple[str, ...], prompts_only: bool, as_version: int | None) -> None:
    """Take in groups from FILEs that export wrote, or prompts from plain jsonl files. Their ids begin with import/.

    Samples that this run could have made, and those that no policy made, are ready to be trained; of others the prompt is sampled again.
    Importing a file again changes nothing.
    """
    from broker.buffer.changes import asking
    from broker.buffer.export import writer_of
    from broker.buffer.imports import read_groups

    file, names = split_words(words)
    if not names:
        raise UsageError("import: no FILE given; expected what `slimebus buffer export` wrote, or a jsonl file of prompts")
    resolved = _resolved(file, wish.given)
    done: dict[str, str] = {}
    with asking(resolved, file, wish.broker, wish.timeout_s) as ask:
        lineage = "" if as_version is None else ask.lineage()
        for name in names:
            for group in read_groups(Path(name), writer_of(Path(name), ""), prompts_only=prompts_only, as_version=as_version):
                if lineage:
                    group.message.lineage = lineage
                done.update(ask.edit(group.message, group.frames).done)
    _say(done, {}, as_json=wish.as_json)


# --- what the commands share ---


def _edit(action: str, words: tuple[str, ...], wish: Wish, states: tuple[str, ...], containing: str, why: str = "") -> None:
    from broker.buffer.changes import asking

    file, names = split_words(words)
    if not (names or states or containing):
        raise UsageError(f"{action}: no GROUP given; name some, or choose with --state or --reason")
    wanted = list(names)
    if states or containing or (names and wish.broker is None):
        able = {"replay": ("dead", "dropped"), "drop": ("queued", "leased", "ready", "dead")}[action]
        with _moment(words, wish.given.get("run_dir")) as moment:
            for name in names:
                moment.group(name)  # a wrong name is told with the nearest ones before anything changes
            wanted += [g.id for g in _chosen(moment, (), states or able, containing)] if states or containing else []
    with asking(_resolved(file, wish.given), file, wish.broker, wish.timeout_s) as ask:
        reply = ask.edit_all(action, wanted, why)
    _say(reply.done, reply.refused, as_json=wish.as_json)


def _say(done: dict[str, str], refused: dict[str, str], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"done": done, "refused": refused}))
    else:
        for name, result in done.items():
            click.echo(f"{name}: {result}")
        for name, reason in refused.items():
            click.echo(f"{name}: refused: {reason}", err=True)
        click.echo(f"{len(done)} groups done, {len(refused)} refused", err=True)
    sys.exit(EXIT_FAILURE if refused else 0)


def _given(run_dir: str | None, keys: str | None = None, key_name: str | None = None) -> dict[str, str]:
    """The options that are config fields."""
    fields = {"run_dir": run_dir, "security.keys": keys, "security.key_name": key_name}
    return {name: value for name, value in fields.items() if value}


def _resolved(file: Path | None, given: dict[str, str]) -> Resolved:
    from slimebus.config import resolve

    return resolve(file, given)


def _run_dir(words: tuple[str, ...], run_dir: str | None) -> Path:
    file, others = split_words(words)
    if others:
        raise UsageError(f"{others[0]!r} is not a RUN.yaml; this command takes no other word")
    return _resolved(file, _given(run_dir)).run_dir


def _moment(words: tuple[str, ...], run_dir: str | None) -> Any:
    from broker.buffer.reader import moment_of

    return moment_of(_resolved(split_words(words)[0], _given(run_dir)).run_dir)


def _chosen(moment: Moment, names: tuple[str, ...], states: tuple[str, ...], containing: str, *, every: bool = False) -> Iterator[Group]:
    """The groups named, or those in these states whose reason contains a text. every: leave out those of evaluations."""
    if names:
        yield from (moment.group(name) for name in names)
        return
    for group in moment.groups(states):
        if containing in group.reason and not (every and group.kind == "eval"):
            yield group


def _listed(row: dict[str, Any]) -> dict[str, str]:
    versions = "" if row["newest_version"] < 0 else f"{row['oldest_version']}..{row['newest_version']}"
    return {
        "group": row["group"],
        "state": row["state"] + (f" {row['step']}" if row["step"] >= 0 else ""),
        "attempt": str(row["attempt"]),
        "failed": str(row["failures"]),
        "worker": row["worker"],
        "samples": str(row["num_samples"] or ""),
        "tokens": str(row["num_tokens"] or ""),
        "versions": versions,
        "reason": row["reason"],
    }


def _table(rows: list[dict[str, str]]) -> Iterator[str]:
    if not rows:
        return
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    yield "  ".join(name.ljust(width) for name, width in widths.items()).rstrip()
    for row in rows:
        yield "  ".join(row[name].ljust(width) for name, width in widths.items()).rstrip()


def _counted(states: dict[str, int]) -> str:
    return ", ".join(f"{count} {state}" for state, count in states.items()) or "none"
