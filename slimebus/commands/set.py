"""`slimebus set`: change settings of a run while it goes on."""

import json
import secrets
from pathlib import Path

import click

from slimebus.config import resolve
from slimebus.config.flags import split_words
from slimebus.errors import UsageError
from slimebus.joining import visit
from slimebus.messages import Scalar, Set, SetReply

INFINITE = ("inf", ".inf", "unbounded")


@click.command("set", short_help="Change settings of a run while it goes on.")
@click.argument("words", nargs=-1, metavar="[RUN.yaml] [NAME VALUE]...")
@click.option("--broker", help="[address] Of the broker, tcp://HOST:PORT; default: broker.bind of the config.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer as one JSON object.")
@click.option("--timeout-s", default=10.0, show_default=True, help="[seconds] How long to wait for the broker.")
@click.option("--keys", help="[path] Folder of keys, or one key file; default: security.keys of the config.")
@click.option("--key-name", help="[name] Which key of that folder; default: the only one of role client.")
def set_(words: tuple[str, ...], broker: str | None, as_json: bool, timeout_s: float, keys: str | None, key_name: str | None) -> None:
    """Change settings of a run while it goes on; without a NAME, show those that can be changed and their values.

    NAME is a config field with or without its section, as in `max-staleness 4` or `broker.max_staleness=4`. All are changed or none.
    They hold from the first step on whose batch is not chosen yet, and over restarts of the broker.
    """
    file, settings = parse(words)
    given = {f"security.{name}": value for name, value in (("keys", keys), ("key_name", key_name)) if value}
    with visit(resolve(file, given), broker, what="set") as client:
        answer = client.call(Set(key=secrets.token_hex(8), settings=settings), timeout_s=timeout_s).expect(SetReply)
    click.echo(as_one_object(answer) if as_json else "\n".join(summary(answer, settings)))


def parse(words: tuple[str, ...]) -> tuple[Path | None, dict[str, Scalar]]:
    """The run.yaml if the first word is one, and the settings. Raises UsageError for a name without a value."""
    file, pairs = split_words(words)
    rest = [part for word in pairs for part in word.split("=", 1)]
    if len(rest) % 2:
        raise UsageError(f"set: {rest[-1]!r} has no value; give pairs, as in `slimebus set max-staleness 4 rollout-batch-size 64`")
    names = [name.lstrip("-").replace("-", "_") for name in rest[::2]]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"set: {twice} is given twice")
    return file, dict(zip(names, map(value_of, rest[1::2]), strict=True))


def value_of(word: str) -> Scalar:
    """A number where the word is one, else the word; `inf`, `.inf` and `unbounded` are infinity."""
    if word in INFINITE:
        return float("inf")
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def summary(answer: SetReply, asked: dict[str, Scalar]) -> list[str]:
    """What changed and from which step on; without a request, every setting and its value."""
    if not asked:
        width = max(map(len, answer.settings), default=0)
        return [f"{name:<{width}}  {_shown(value)}" for name, value in answer.settings.items()]
    if not answer.changed:
        return ["nothing changed: these values were in force already"]
    lines = [f"{name}: {_shown(old)} -> {_shown(new)}" for name, (old, new) in answer.changed.items()]
    return [*lines, f"from step {answer.step} on; earlier steps have their batches already"]


def as_one_object(answer: SetReply) -> str:
    """The answer as JSON, which has no infinity: an unbounded max_staleness is the word."""
    changed = {name: [_plain(old), _plain(new)] for name, (old, new) in answer.changed.items()}
    settings = {name: _plain(value) for name, value in answer.settings.items()}
    return json.dumps({"step": answer.step, "changed": changed, "settings": settings}, indent=2)


def _plain(value: Scalar) -> Scalar:
    return "unbounded" if value == float("inf") else value


def _shown(value: Scalar) -> str:
    return f"{value:g}" if isinstance(value, float) and value != float("inf") else str(_plain(value))
