"""The bulk frames of replies: prompts and samples as they are stored, or as the burst at hand writes them.

    table | tokens | loss_mask | rollout_logprobs | fields of the put ... | late fields ...

The table's `fields` describe the frames behind it, as in a put; all else that it says stays as it is.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from broker.source import FileRows
from broker.state.effects import Bulk, EvalPrompt, Inline, StoredPayload, StoredPrompt, Write
from broker.state.groups import field_key
from broker.store import Damaged, Store
from slimebus.bus.messages import Field
from slimebus.bus.sample_table import TOKEN_FIELDS

T = TypeVar("T")
Writes = Mapping[tuple[str, str], Write]


class ReplyFrames:
    """Finds frames in a store, and those of evaluations in their files. Raises Damaged for what is gone or cannot be read."""

    def __init__(self, store: Store, eval_rows: Mapping[str, FileRows]) -> None:
        self.store, self.eval_rows = store, eval_rows

    def frames_for(self, part: Bulk, writes: Writes) -> Sequence[Any]:
        """The frames of one part of a reply. writes: what was just written."""
        match part:
            case Inline(value):
                return [value]
            case EvalPrompt(dataset, row):
                return [self.eval_rows[dataset].record(row)]
            case StoredPrompt(group):
                written = writes.get(("prompts", group))  # most leases are of prompts drawn in the same burst
                return [_present(written.value if written else self.store.get("prompts", group), "prompts", group)]
            case StoredPayload(group, num_frames, late, only, table):
                frames = self._stored_frames(table, group, num_frames)
                if not late and only is None:
                    return frames
                late_frames = [(field, self._stored_frames("fields", field_key(group, field.name), 1)[0]) for field in late]
                try:
                    return assembled(frames, late_frames, only)
                except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError, ValueError) as bad:
                    raise Damaged("payloads", group, f"the sample table of group {group} is damaged: {bad}") from None

    def _stored_frames(self, table: str, key: str, num_frames: int) -> Sequence[Any]:
        frames = _present(self.store.frames(table, key), table, key)
        if len(frames) != num_frames:
            raise Damaged(table, key, f"{table} of group {key} are damaged: {len(frames)} frames, its row says {num_frames}")
        return frames


def _present(value: T | None, table: str, key: str) -> T:
    if value is None:
        raise Damaged(table, key, f"{table} of group {key} are gone; ask again", code="gone")
    return value


def assembled(frames: Sequence[Any], late: Sequence[tuple[Field, Any]], only: Sequence[str] | None) -> list[Any]:
    """A group's frames, then the late ones. only: of the fields beyond the usual three, just these."""
    table: dict[str, Any] = msgspec.msgpack.decode(frames[0])
    columns = [*zip(table["fields"], frames[1:], strict=True), *((msgspec.to_builtins(field), frame) for field, frame in late)]
    kept = [(field, frame) for field, frame in columns if only is None or field["name"] in TOKEN_FIELDS or field["name"] in only]
    table["fields"] = [field for field, _ in kept]
    return [msgspec.msgpack.encode(table), *(frame for _, frame in kept)]
