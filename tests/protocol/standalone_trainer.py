"""A trainer written from docs/protocol.md alone. `python -I standalone_trainer.py ADDRESS STEPS`. It checks every byte it fetches."""

import os
import sys
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import msgpack
from standalone_bus import Bus, sample

ITEM_BYTES = {"int32": 4, "uint8": 1, "float32": 4, "int16": 2}


def check(group: str, table: dict[str, Any], frames: list[bytes]) -> int:
    """Every field of every sample is what the worker made, byte for byte; the number of samples."""
    lengths = table["num_tokens"]
    assert len(table["fields"]) == len(frames)
    for field, frame in zip(table["fields"], frames, strict=True):
        start = 0
        for i, shape in enumerate(field.get("shapes") or [[length] for length in lengths]):
            size = ITEM_BYTES[field["dtype"]]
            for n in shape:
                size *= n
            assert frame[start : start + size] == sample(group, i)[field["name"]], (group, i, field)
            start += size
        assert start == len(frame)
    assert lengths == [sample(group, i)["T"] for i in range(len(lengths))]
    assert table["reward"] == [0.5 + i for i in range(len(lengths))]
    assert table["metadata"] == [{"index": i} for i in range(len(lengths))]
    return len(lengths)


def batch_of(bus: Bus, step: int) -> dict[str, Any]:
    """The groups of a step, when there are enough of them."""
    while True:
        bus.beat()
        kind, told, _ = bus.ask("batch", {"step": step, "wait_s": bus.heartbeat_s / 2})
        assert kind == "batch_reply", kind
        assert told["step"] == step
        if told.get("groups"):
            return told


def fetch(bus: Bus, groups: list[str]) -> int:
    """Fetch the groups and check them; the number of samples."""
    samples = 0
    while groups:
        kind, told, frames = bus.ask("fetch", {"groups": groups})
        assert kind == "fetch_reply", kind
        assert sum(told["num_frames"]) == len(frames)
        for count in told["num_frames"]:  # an answer holds the first groups, as many as fit
            samples += check(groups[0], msgpack.unpackb(frames[0]), frames[1:count])
            groups, frames = groups[1:], frames[count:]
    return samples


def main() -> None:
    bus = Bus(sys.argv[1], "stand-alone trainer", "trainer")
    bus.ask("resume", {"step": 0, "version": 0, "lineage": bus.instance})
    bus.ask("publish", {"lineage": bus.instance, "version": 0, "publishers": ["tcp://127.0.0.1:1"], "digest": "none"})
    trained: list[str] = []
    samples = 0
    for step in range(int(sys.argv[2])):
        told = batch_of(bus, step)
        groups = [group for group, *_ in told["groups"]]
        samples += fetch(bus, groups)
        if told.get("next_version", -1) > told["version"]:
            bus.ask(
                "publish", {"lineage": bus.instance, "version": told["next_version"], "publishers": ["tcp://127.0.0.1:1"], "digest": "none"}
            )
        bus.ask("commit", {"step": step, "checkpoint": step + 1, "unused": {groups[0]: "shown"}, "metrics": {"loss": 0.5}})
        trained += groups
        print(f"step {step}", flush=True)
    bus.ask("finish", {"reason": "enough"})
    while not bus.is_finished:
        bus.beat()
    bus.leave()
    assert len(trained) == len(set(trained))
    print({"groups": len(trained), "samples": samples, "repeats": bus.repeats})


if __name__ == "__main__":
    main()
