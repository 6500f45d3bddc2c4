"""A rollout worker written from docs/protocol.md alone. `python -I standalone_worker.py ADDRESS NAME`."""

import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import msgpack
from standalone_bus import Bus, sample

DTYPES = {"tokens": "int32", "loss_mask": "uint8", "rollout_logprobs": "float32"}


def put(bus: Bus, leased: dict) -> str:
    """Make the samples of a group and put them; what became of it."""
    group, made = leased["group"], [sample(leased["group"], i) for i in range(leased["num_samples"])]
    fields = [{"name": name, "dtype": dtype} for name, dtype in DTYPES.items()]  # no shapes: every array is [T]
    fields.append({"name": "pages", "dtype": "int16", "shapes": [[2, 2] for _ in made]})
    table = {
        "num_tokens": [s["T"] for s in made],
        "versions": [[[-1, s["T"]]] for s in made],
        "fields": fields,
        "reward": [0.5 + i for i in range(len(made))],
        "metadata": [{"index": i} for i in range(len(made))],
    }
    bulk = [msgpack.packb(table), *(b"".join(s[field["name"]] for s in made) for field in fields)]
    body = {"group": group, "lease": leased["lease"], "lineage": ""}
    kind, told, _ = bus.ask("put", body, bulk)
    assert kind == "put_reply", kind
    return told["result"]


def main() -> None:
    bus = Bus(sys.argv[1], sys.argv[2], "rollout")
    results: dict[str, int] = {}
    given_back, seen = 0, set()
    while not bus.is_finished:
        bus.beat()
        kind, told, frames = bus.ask("lease", {"want": 2, "wait_s": bus.heartbeat_s / 2, "needs_weights": False})
        assert kind == "lease_reply", kind
        groups = told.get("groups", [])
        bus.leases |= {leased["lease"] for leased in groups}
        for leased, record in zip(groups, frames, strict=True):
            prompt = msgpack.unpackb(record)
            assert prompt["prompt"] == f"p{leased['group'].split('/')[1]}", prompt
            is_first = leased["group"] not in seen
            seen.add(leased["group"])
            if is_first and int(leased["group"].split("/")[1]) % 7 == 3:
                body = {"group": leased["group"], "lease": leased["lease"], "outcome": "requeue", "reason": "I would rather not"}
                assert bus.ask("give_back", body)[0] == "ok"
                given_back += 1
            else:
                time.sleep(0.05)
                bus.beat()
                result = put(bus, leased)
                results[result] = results.get(result, 0) + 1
            bus.leases.discard(leased["lease"])
    bus.leave()
    print({"put": results, "given_back": given_back, "repeats": bus.repeats})


if __name__ == "__main__":
    main()
