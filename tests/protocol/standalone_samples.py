"""Samples that follow from the name of their group, so that whoever reads them knows what each byte must be."""

import struct


def sample(group: str, index: int) -> dict[str, bytes | int]:
    """Token arrays of sample `index` of a group `0/ROW` as raw little-endian bytes, and T, their length."""
    row = int(group.split("/")[1])
    length = 3 + (row + index) % 5
    return {
        "T": length,
        "tokens": struct.pack(f"<{length}i", *(row * 1000 + index * 10 + t for t in range(length))),
        "loss_mask": bytes([0, *[1] * (length - 1)]),
        "rollout_logprobs": struct.pack(f"<{length}f", *(-0.25 * t for t in range(length))),
        "pages": struct.pack("<4h", row % 100, index, -1, 7),
    }
