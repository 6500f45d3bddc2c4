"""Groups of a run for the page: a list, and one with its samples token by token."""

import contextlib
import heapq
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from broker.inspect.export import summary_of
from broker.inspect.reader import StoreSnapshot
from broker.inspect.show import Decode, shortened
from broker.state.groups import Group
from slimebus.bus.errors import DataError, UsageError
from slimebus.bus.samples import Sample, decode_group
from slimebus.client.exported_groups import GROUPS_FILE, SAMPLES_FOLDER, ExportedGroup, numbered_rows, step_folders

DUMPED = "dumped"
"""In place of a state: of groups that the trainer kept, in any state in the store."""

MAX_GROUPS, MAX_SAMPLES, MAX_TOKENS = 200, 32, 4000
"""Of one answer: groups listed, samples of a group, tokens of a sample; what is beyond is only counted."""
MAX_PIECE = 8
"""Tokens that may make one character together."""


def list_groups(snapshot: StoreSnapshot, states: Iterable[str], containing: str) -> list[dict[str, Any]]:
    """The groups of these states with a text in their id or reason: of the newest steps first, at most MAX_GROUPS."""
    found = (group for group in snapshot.groups(states) if containing in group.reason or containing in group.id)
    newest = heapq.nlargest(MAX_GROUPS, found, key=lambda group: (group.step, group.kind == "train", group.position))
    return [{"group": group.id} | summary_of(group) for group in newest]


def group_detail(snapshot: StoreSnapshot, group: Group, decode: Decode | None) -> dict[str, Any]:
    """A group: what became of it, its prompt, its samples. Raises ProtocolError for samples that nobody can read."""
    prompt, stored = snapshot.prompt(group.id) or {}, snapshot.samples(group)
    samples = [] if stored is None else decode_group(stored.frames)
    shown = {name: shortened(value) for name, value in prompt.items() if value}
    return {"group": group.id, **summary_of(group), "prompt": shown} | _samples(samples, decode)


def list_dumped(run_dir: Path, containing: str) -> list[dict[str, Any]]:
    """The groups with samples that the trainer kept (trainer.dump_samples), as `list_groups`: the newest step first."""
    found = (about for _, about, group in _dumped_groups(run_dir) if containing in group.group)
    return list(itertools.islice(found, MAX_GROUPS))


def dumped_detail(run_dir: Path, name: str, decode: Decode | None) -> dict[str, Any]:
    """A group that the trainer kept, as `group_detail`; its prompt is in the tokens. Raises UsageError where there is none."""
    for place, about, group in _dumped_groups(run_dir):
        if group.group == name:
            return about | {"worker": "", "prompt": {}} | _samples(group.samples(place), decode)
    raise UsageError(f"the samples of group {name!r} are not kept any more")


def _dumped_groups(run_dir: Path) -> Iterator[tuple[Path, dict[str, Any], ExportedGroup]]:
    """The folder of each kept group, its record, and the group; damaged lines are left out and counted."""
    for step, place in reversed(step_folders(run_dir / SAMPLES_FOLDER).items()):
        rows = list[ExportedGroup | DataError]()
        with contextlib.suppress(UsageError):  # a step that cannot be read hides no other
            rows += (row for _, row in numbered_rows(place / GROUPS_FILE, ExportedGroup))
        num_damaged = sum(isinstance(row, DataError) for row in rows)
        reason = f"{num_damaged} of the {len(rows)} lines of its step are damaged and left out" if num_damaged else ""
        for group in rows:
            if isinstance(group, ExportedGroup) and group.table is not None:
                yield (
                    place,
                    {"group": group.group, "state": DUMPED, "step": step, "num_samples": group.num_samples, "reason": reason},
                    group,
                )


def _samples(samples: list[Sample], decode: Decode | None) -> dict[str, Any]:
    return {"num_samples": len(samples), "samples": [_sample(sample, decode) for sample in samples[:MAX_SAMPLES]]}


def _sample(sample: Sample, decode: Decode | None) -> dict[str, Any]:
    """pieces: [text, tokens, is trained, version, least logprob] for each token, or for those that make one character together."""
    versions = itertools.chain.from_iterable([version] * length for version, length in sample.versions)
    tokens = list(zip(sample.tokens.tolist(), sample.loss_mask.tolist(), versions, sample.rollout_logprobs.tolist(), strict=True))
    about = {"reward": sample.reward, "status": sample.status, "num_tokens": len(tokens)}
    return about | {"pieces": list(_pieces(tokens[:MAX_TOKENS], decode))}


def _pieces(tokens: list[tuple[int, int, int, float]], decode: Decode | None) -> Iterator[tuple[str, int, bool, int, float]]:
    begin, before = 0, list[int]()
    for end in range(1, len(tokens) + 1):
        ids = [token for token, *_ in tokens[begin:end]]
        text = f"{ids[0]} " if decode is None else _decode_after(decode, before, ids)
        if not text.endswith("\ufffd") or end == len(tokens) or end - begin == MAX_PIECE:
            _, mask, version, _ = tokens[begin]
            yield text, end - begin, bool(mask), version, round(min(logprob for *_, logprob in tokens[begin:end]), 4)
            begin, before = end, ids


def _decode_after(decode: Decode, before: list[int], ids: list[int]) -> str:
    """The text of these tokens behind others: some tokenizers leave out the space in front of what stands first."""
    context, both = decode(before), decode(before + ids)
    return both[len(context) :] if both.startswith(context) else decode(ids)
