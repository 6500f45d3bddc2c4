"""A well-behaved worker and its trainer in one process. `python honest_pair.py ADDRESS`.

The worker leases groups and puts 8 samples of 256 tokens for each; the trainer takes batches, fetches and commits them.
Prints a JSON line every half second: groups put so far. Ends at SIGTERM; the last line says `"problems"`.
"""

import json
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "fixtures")]

from made_samples import made  # noqa: E402
from scripted import begin, lease, put, take, train  # noqa: E402

from slimebus.bus.errors import SlimebusError  # noqa: E402
from slimebus.bus.messages import Heartbeat  # noqa: E402
from slimebus.bus.transport.client import Client  # noqa: E402

SAMPLES = [made((0, 256))] * 8


class Pair:
    """The worker and the trainer, in a thread each."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.put, self.committed = 0, 0
        self.problems: list[str] = []
        self.stop = threading.Event()

    def work(self) -> None:
        """Lease and put until stopped."""
        self._repeat(self._join("good", "rollout"), self._round)

    def _round(self, worker: Client) -> None:
        for group in lease(worker, 8, wait_s=1.0):
            answer = put(worker, group, SAMPLES)
            if answer.result == "accepted":
                self.put += 1
            else:
                self.problems.append(f"put {answer.result}: {answer.reason}")

    def train(self) -> None:
        """Train what the worker puts until stopped."""
        trainer = self._join("trainer", "trainer")
        begin(trainer)
        self._repeat(trainer, self._step)

    def _step(self, trainer: Client) -> None:
        if take(trainer, self.committed, wait_s=1.0).groups:
            train(trainer, self.committed, checkpoint=self.committed + 1)
            self.committed += 1

    def _repeat(self, client: Client, turn: Callable[[Client], None]) -> None:
        while not self.stop.is_set():
            try:
                turn(client)
            except SlimebusError as bad:
                self.problems.append(f"{client.name}: {bad.code}: {bad.text}")
                time.sleep(0.1)
        client.close()

    def _join(self, name: str, role: str) -> Client:
        client = Client(self.address, name=name)
        beat = Heartbeat(state="serving" if role == "rollout" else "training")
        client.keep_alive(client.join(role, timeout_s=30).heartbeat_s, lambda: beat, lambda reply: None, self._lost)
        return client

    def _lost(self, problem: SlimebusError) -> None:
        self.problems.append(f"lost: {problem.code}: {problem.text}")


def main() -> None:
    """See the head of this file."""
    pair = Pair(sys.argv[1])
    threads = [threading.Thread(target=pair.work), threading.Thread(target=pair.train)]
    for thread in threads:
        thread.start()
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    while not ended.wait(0.5):
        print(json.dumps({"time": time.monotonic(), "put": pair.put, "committed": pair.committed}), flush=True)
    pair.stop.set()
    for thread in threads:
        thread.join()
    print(json.dumps({"put": pair.put, "committed": pair.committed, "problems": pair.problems[:20]}), flush=True)


if __name__ == "__main__":
    main()
