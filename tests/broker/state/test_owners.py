"""Each table of the state has one owner, the file that writes it; other files call its functions."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from broker.state import groups, records, waiting
from broker.state.broker_state import State
from broker.state.prompt_source import PromptSource
from broker.state.rules import Rules

BROKER = Path(records.__file__).parents[1]
OWNERS: dict[Any, str] = {
    groups.Group: "groups",
    groups.WorkerLeases: "groups",
    records.ClientRecord: "clients",
    records.StepRecord: "batches",
    records.Evaluation: "evaluation",
    records.Tally: "evaluation",
    records.ConsumerRecord: "consumers",
    records.PushRecord: "prompts",
    records.SettingsChange: "settings",
    waiting.Waiting: "waiting",
}
"""Record -> the file that writes its fields. Any other field of the state, of `meta` (counters) and of `pace` has one, too."""
CHANGES = {"add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popleft", "remove", "setdefault", "update"}
"""Methods that change a container in place."""


def of_state() -> set[str]:
    """Fields of the state and of its tables."""
    state = State(Rules(batch_size=1), PromptSource(), "r")
    found = {f"{table}.{name}" for table in ("meta", "pace") for name in dir(getattr(state, table))}
    return found | {name for table in (state, state.groups, state.leases) for name in vars(table)}


def of_records() -> dict[str, set[str]]:
    """Name of a field -> the owners of the records that have one of this name."""
    found = defaultdict(set)
    for record, owner in OWNERS.items():
        for field in msgspec.structs.fields(record):
            found[field.name].add(owner)
    return found


def names(node: ast.AST) -> list[str]:
    """`a.b[c].d()` as a, b, d."""
    found: list[str] = []
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        found += [node.attr] if isinstance(node, ast.Attribute) else []
        node = node.func if isinstance(node, ast.Call) else node.value
    return [*([node.id] if isinstance(node, ast.Name) else []), *reversed(found)]


def written(tree: ast.AST) -> Iterator[list[str]]:
    """What a file assigns to, deletes, or changes in place."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            path = names(node.func.value)
            if path[-2:] not in (["state", "groups"], ["self", "groups"]):  # a table: its verbs are for all
                yield path
        targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else [node.target] if isinstance(node, ast.AugAssign) else []
        for target in targets:
            yield from (names(one) for one in (target.elts if isinstance(target, ast.Tuple) else [target]))


def writers() -> dict[str, set[str]]:
    """Field -> files that write it. Its first value, and what a start reads back, is no write."""
    kept, found = of_state() | of_records().keys(), defaultdict(set)
    for file in sorted(BROKER.rglob("*.py")):
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                node.body = [part for part in node.body if getattr(part, "name", "") not in ("__init__", "restore")]
        for path in written(tree):
            name = ".".join(path[-2:]) if path[-2:-1] in (["meta"], ["pace"]) else path[-1] if len(path) > 1 else ""
            if name in kept and (file.parent.name == "state" or "state" in path[:-1]):
                found[name].add(file.stem)
    return found


def test_each_field_of_the_state_is_written_by_its_owner_alone() -> None:
    alone, owners, found = of_state(), of_records(), writers()
    assert found["clients"] == {"clients"}
    foreign = {name: sorted(files) for name, files in found.items() if len(files - owners[name]) > (name in alone)}
    assert not foreign, "call a function of the owner, or add one there"


def test_no_field_is_written_by_its_name() -> None:
    """Where it could not be seen: one verb of groups raises a counter that its caller names."""
    files = [file.stem for file in (BROKER / "state").glob("*.py") if "setattr(" in file.read_text()]
    assert files == ["groups"]
