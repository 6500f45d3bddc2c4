"""A well-behaved worker and its trainer in one process. `python honest_pair.py ADDRESS BATCH_SIZE`.

The worker leases groups, puts 8 samples of 256 tokens for each, one after the other; the trainer takes batches, fetches and commits them.
Prints a JSON line every half second: groups put so far. Ends with its stdin; the last line says `"problems"`.
"""

import json
import sys
import threading
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from slimebus.bus import messages as m
from slimebus.bus.errors import SlimebusError
from slimebus.bus.samples import Sample, encode_group
from slimebus.bus.transport.client import Client

TOKENS, SAMPLES = 256, 8


class Pair:
    """The worker in the main thread, the trainer in one of its own."""

    def __init__(self, address: str, batch_size: int) -> None:
        self.address, self.batch_size = address, batch_size
        self.put = 0
        self.committed = 0
        self.problems: list[str] = []
        self.stop = threading.Event()

    def work(self) -> None:
        client = Client(self.address, name="good")
        client.keep_alive(
            client.join("rollout", timeout_s=30).heartbeat_s, lambda: m.Heartbeat(state="serving"), lambda _: None, self._lost
        )
        sample = Sample(
            tokens=np.arange(TOKENS, dtype=np.int32),
            loss_mask=np.ones(TOKENS, np.uint8),
            rollout_logprobs=np.zeros(TOKENS, np.float32),
            versions=[(m.NO_VERSION, TOKENS)],
            reward=1.0,
        )
        frames = encode_group([sample] * SAMPLES)
        while not self.stop.is_set():
            try:
                self._round(client, frames)
            except SlimebusError as bad:
                self.problems.append(f"worker: {bad.code}: {bad.text}")
                time.sleep(0.1)
        client.close()

    def _round(self, client: Client, frames: list[bytes]) -> None:
        leased = client.call(m.Lease(want=8, wait_s=1.0, needs_weights=False)).message
        assert isinstance(leased, m.LeaseReply)
        for group in leased.groups:
            put = m.Put(group=group.group, lease=group.lease, lineage="")
            answer = client.call(put, frames).message
            assert isinstance(answer, m.PutReply)
            if answer.result == "accepted":
                self.put += 1
            else:
                self.problems.append(f"put {answer.result}: {answer.reason}")

    def train(self) -> None:
        client = Client(self.address, name="trainer")
        client.keep_alive(
            client.join("trainer", timeout_s=30).heartbeat_s, lambda: m.Heartbeat(state="training"), lambda _: None, self._lost
        )
        client.call(m.Resume(step=0, version=0, lineage="l"))
        client.call(m.Publish(lineage="l", version=0, publishers=[], digest="d"))
        while not self.stop.is_set():
            try:
                batch = client.call(m.Batch(step=self.committed, wait_s=1.0)).message
                assert isinstance(batch, m.BatchReply)
                if not batch.groups:
                    continue
                client.call(m.Fetch(groups=[g.group for g in batch.groups]))
                client.call(m.Publish(lineage="l", version=self.committed + 1, publishers=[], digest="d"))
                client.call(m.Commit(step=self.committed, checkpoint=self.committed + 1))
                self.committed += 1
            except SlimebusError as bad:
                self.problems.append(f"trainer: {bad.code}: {bad.text}")
                time.sleep(0.1)
        client.close()

    def _join(self, name: str, role: str) -> Client:
        client = Client(self.address, name=name)
        welcome = client.join(role, timeout_s=30)
        client.keep_alive(welcome.heartbeat_s, lambda: m.Heartbeat(state="busy"), lambda _: None, self._lost)
        return client

    def _lost(self, problem: SlimebusError) -> None:
        self.problems.append(f"lost: {problem.code}: {problem.text}")


def main() -> None:
    pair = Pair(sys.argv[1], int(sys.argv[2]))
    threads = [threading.Thread(target=pair.work), threading.Thread(target=pair.train)]
    for thread in threads:
        thread.start()
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    while not ended.wait(0.5):
        print(json.dumps({"time": time.monotonic(), "put": pair.put, "committed": pair.committed}), flush=True)
    pair.stop.set()
    for thread in threads:
        thread.join()
    print(json.dumps({"put": pair.put, "committed": pair.committed, "problems": pair.problems[:20]}), flush=True)


if __name__ == "__main__":
    main()
