"""The frames of a group's record with the fields that were put later, or with some of its fields only.

    header | tokens | loss_mask | rollout_logprobs | fields of the put ... | late fields ...

The header's `fields` list describes the frames behind it, as in a put; whatever else it says stays as it is.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from broker.state.consumers import TOKEN_FIELDS
from slimebus.messages import Field


def assembled(frames: Sequence[Any], late: Sequence[tuple[Field, Any]], only: Sequence[str] | None) -> list[Any]:
    """The record's frames, then the late ones. only: of the fields beyond the usual three, just these."""
    header: dict[str, Any] = msgspec.msgpack.decode(frames[0])
    columns = [*zip(header.get("fields", []), frames[1:], strict=True), *((msgspec.to_builtins(field), frame) for field, frame in late)]
    kept = [(field, frame) for field, frame in columns if only is None or field["name"] in TOKEN_FIELDS or field["name"] in only]
    header["fields"] = [field for field, _ in kept]
    return [msgspec.msgpack.encode(header), *(frame for _, frame in kept)]
