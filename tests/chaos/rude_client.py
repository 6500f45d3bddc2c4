"""A worker that does everything wrong, beside honest ones: `python rude_client.py ADDRESS SEED`, until SIGTERM.

It leases groups as they do and puts what nobody can train, under wrong leases, twice or after giving them back; it sends requests of other
roles and numbers that are none, and joins under names that are too long. Prints what was asked and how it was answered, and as `accepted`
every wrong put that the broker took: none may be. Exit code 1 when one was.
"""

import json
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "fixtures")]

from made_samples import made  # noqa: E402
from simulation.rude import spoiled  # noqa: E402

from slimebus.bus import messages as m  # noqa: E402
from slimebus.bus.errors import SlimebusError  # noqa: E402
from slimebus.bus.samples import encode_group  # noqa: E402
from slimebus.bus.transport.client import Client  # noqa: E402

TOKENS, EXTRAS = 16, {"extra": np.zeros(3, np.uint8)}
PAUSE_S = 0.5
"""Between two groups: the others make most of what is trained."""
NONSENSE: list[m.Message] = [
    m.Lease(want=-1, wait_s=1.0),
    m.Lease(want=1, wait_s=float("nan")),
    m.Lease(want=1, wait_s=1e9),
    m.Resume(step=0, version=0, lineage="mine"),
    m.Publish(lineage="mine", version=1 << 40, publishers=["tcp://0.0.0.0:1"], digest="d"),
    m.Batch(step=1 << 40, wait_s=1.0),
    m.Commit(step=0, checkpoint=1 << 40),
    m.Fetch(groups=["\U0001f422" * 2000]),
    m.Finish(reason="enough"),
    m.GiveBack(group="", lease=-1, outcome="eaten", reason=""),
]


class RudeClient:
    """One connection and what came of its requests."""

    def __init__(self, address: str, seed: int) -> None:
        self.address, self.random = address, random.Random(seed)
        self.answers: Counter[str] = Counter()
        self.accepted: list[str] = []
        self.truth = m.HeartbeatReply()
        self.client = Client(address, name=f"rude-{seed}")
        self.client.rejoins = True

    def run(self) -> None:
        """Be rude until interrupted."""
        welcome = self.client.join("rollout", timeout_s=120.0)
        beat = lambda: m.Heartbeat(state="serving", lineage=self.truth.lineage, serving=self.truth.version)  # noqa: E731
        self.client.keep_alive(welcome.heartbeat_s, beat, self._hear, lambda _: None)
        while True:
            self.ask(self.random.choice(NONSENSE))
            self._join_under_a_long_name()
            self._spoil()
            time.sleep(PAUSE_S)

    def _hear(self, reply: m.HeartbeatReply) -> None:
        self.truth = reply

    def ask(self, message: m.Message, frames: list[bytes] | None = None) -> m.Message | None:
        """The answer, counted; None for an error."""
        try:
            answer = self.client.call(message, frames or [], timeout_s=10.0).message
        except SlimebusError as bad:
            self.answers[f"{type(message).__name__}: {bad.code}"] += 1
            return None
        self.answers[f"{type(message).__name__}: {getattr(answer, 'result', 'ok')}"] += 1
        return answer

    def _join_under_a_long_name(self) -> None:
        long = None
        try:
            long = Client(self.address, name="long")
            long.name = "\U0001f422" * 128  # past the client's own check
            long.join("rollout", timeout_s=5.0)
            self.accepted.append("a name of 512 bytes")
        except SlimebusError as bad:
            self.answers[f"long name: {bad.code}"] += 1
        finally:
            if long is not None:
                long.close()

    def _spoil(self) -> None:
        """Lease a group and put it wrong, again under the same lease, and once more after giving it back."""
        leased = self.ask(m.Lease(want=1, wait_s=1.0, lineage=self.truth.lineage, serving=self.truth.version))
        for group in leased.groups if isinstance(leased, m.LeaseReply) else ():
            put = m.Put(group=group.group, lease=group.lease, lineage=self.truth.lineage)
            frames = encode_group([made((self.truth.version, TOKENS), extras=EXTRAS)] * group.num_samples)
            for _ in range(self.random.randint(1, 3)):
                self._put_wrong(put, frames)
            self.ask(m.GiveBack(group=group.group, lease=group.lease, outcome="requeue", reason="rude"))
            self._put_wrong(put, frames)

    def _put_wrong(self, put: m.Put, frames: list[bytes]) -> None:
        what, put, frames = spoiled(self.random, put, frames, has_lineage=True)
        if getattr(self.ask(put, frames), "result", "") == "accepted":
            self.accepted.append(what)


def main() -> None:
    """See the head of this file."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    one = RudeClient(sys.argv[1], int(sys.argv[2]))
    try:
        one.run()
    except KeyboardInterrupt:
        print(json.dumps({"accepted": one.accepted, "answers": dict(sorted(one.answers.items()))}), flush=True)
    one.client.close()
    sys.exit(1 if one.accepted else 0)


if __name__ == "__main__":
    main()
