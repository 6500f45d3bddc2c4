"""`slimebus set`: change settings of a run while it goes on."""

import json
import secrets
from collections.abc import Sequence

import click

from slimebus.bus.errors import UsageError
from slimebus.bus.messages import Scalar, Set, SetReply
from slimebus.client.connect import RESTART_S, connect_without_joining
from slimebus.config.flags import RunCommand, RunTarget, asks_broker, of_run
from slimebus.telemetry.formatting import align_columns

INFINITE = ("inf", ".inf", "unbounded")


@click.command("set", cls=RunCommand, context_settings={"ignore_unknown_options": True})
@of_run("[NAME VALUE]...")
@asks_broker(10.0)
@click.option("--json", "as_json", is_flag=True, help="Print the answer as one JSON object.")
def set_(run: RunTarget, broker: str | None, as_json: bool, timeout_s: float) -> None:
    """Change settings of a run while it goes on; without a NAME, show those that can be changed and their values.

    NAME is a config field with or without its section, as in `max-staleness 4` or `broker.max_staleness=4`. All are changed or none.
    They hold from the first step without a chosen batch on, and over restarts of the broker.
    """
    settings = parse(run.names)
    with connect_without_joining(run.resolved, broker, what="set", patience_s=min(timeout_s, RESTART_S)) as client:
        answer = client.call(Set(key=secrets.token_hex(8), settings=settings), timeout_s=timeout_s).expect(SetReply)
    changed = {name: [_plain(value) for value in values] for name, values in answer.changed.items()}
    now = {name: _plain(value) for name, value in answer.settings.items()}
    if as_json:
        lines = [json.dumps({"step": answer.step, "changed": changed, "settings": now}, indent=2)]
    elif not settings:
        lines = align_columns(now.items())
    elif changed:
        lines = [f"{name}: {old} -> {new}" for name, (old, new) in changed.items()]
        lines.append(f"from step {answer.step} on; earlier steps have their batches already")
    else:
        lines = ["nothing changed: these values were in force already"]
    click.echo("\n".join(lines))


def parse(words: Sequence[str]) -> dict[str, Scalar]:
    """The settings of these words. Raises UsageError for a name without a value."""
    rest = [part for word in words for part in word.split("=", 1)]
    if len(rest) % 2:
        raise UsageError(f"set: {rest[-1]!r} has no value; give pairs, as in `slimebus set max-staleness 4 rollout-batch-size 64`")
    names = [name.lstrip("-").replace("-", "_") for name in rest[::2]]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"set: {twice} is given twice")
    return dict(zip(names, map(value_of, rest[1::2]), strict=True))


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


def _plain(value: Scalar) -> Scalar:
    """JSON has no infinity: an unbounded max_staleness is the word. A whole number is shown as one."""
    if not isinstance(value, float):
        return value
    return "unbounded" if value == float("inf") else int(value) if value.is_integer() else value
