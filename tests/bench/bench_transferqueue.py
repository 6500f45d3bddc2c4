"""TransferQueue with its simple backend, for `bin/bench broker`: the same groups put and got by one process of clients.

    bench_transferqueue.py [--rounds]     makes .venv-transferqueue where it is missing; reads rounds from stdin

Each line of stdin is a number of groups; each answer one JSON line {"puts_per_s", "gets_per_s", "p99_ms", "memory_mib"}. The first line of
stdout says "ready". TransferQueue keeps everything in memory, in processes of Ray.
"""

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from own_environment import enter_environment

SAMPLES, TOKENS = 8, 3888
FIELDS = ["tokens", "loss_mask", "rollout_logprobs"]
CHUNK_GROUPS = 16


def main() -> None:
    """See the head of this file."""
    enter_environment("transferqueue")
    os.environ.update(RAY_DEDUP_LOGS="0", TQ_LOGGING_LEVEL="ERROR", RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray and TransferQueue print to stdout
    queue = Queue(window=int(sys.argv[1]) if len(sys.argv) > 1 else 8)
    try:
        print("ready", file=answers, flush=True)
        for number, line in enumerate(sys.stdin):
            print(json.dumps(queue.round(f"round{number}", int(line))), file=answers, flush=True)
    finally:
        queue.close()


class Queue:
    """A TransferQueue and one process of clients, `window` requests at once."""

    def __init__(self, window: int) -> None:
        import ray
        import torch
        import transfer_queue
        from tensordict import TensorDict

        # A count of its own, not of processors: the controller and each storage unit ask for one.
        ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        transfer_queue.init()
        self.client, self.closer = transfer_queue.get_client(), transfer_queue.close
        self.window, self.pool, self.ray = window, ThreadPoolExecutor(window), ray
        shape = (SAMPLES, TOKENS)
        self.make = lambda: TensorDict(
            {
                "tokens": torch.randint(0, 50_000, shape, dtype=torch.int32),
                "loss_mask": torch.ones(shape, dtype=torch.uint8),
                "rollout_logprobs": torch.rand(shape, dtype=torch.float32),
            },
            batch_size=SAMPLES,
        )

    def round(self, partition: str, groups: int) -> dict[str, float]:
        """Put that many groups, look at the memory, get all of them in chunks, clear them."""
        made, latencies = [self.make() for _ in range(16)], []

        def put(number: int) -> None:
            started = time.perf_counter()
            self.client.put(made[number % len(made)], partition_id=partition)
            latencies.append(time.perf_counter() - started)

        put_s = self._timed(put, groups)
        memory = memory_mib()
        chunks = -(-groups // CHUNK_GROUPS)
        got: list[int] = []

        def get(number: int) -> None:
            size = SAMPLES * min(CHUNK_GROUPS, groups - number * CHUNK_GROUPS)
            meta = self.client.get_meta(data_fields=FIELDS, batch_size=size, partition_id=partition, task_name="train")
            got.append(len(self.client.get_data(meta)))

        get_s = self._timed(get, chunks, window=2)
        assert sum(got) == groups * SAMPLES, f"{sum(got)} of {groups * SAMPLES} samples came back"
        self.client.clear_partition(partition_id=partition)
        p99 = 1000 * sorted(latencies)[len(latencies) * 99 // 100]
        return {"puts_per_s": groups / put_s, "gets_per_s": groups / get_s, "p99_ms": p99, "memory_mib": memory}

    def _timed(self, work: Any, count: int, window: int = 0) -> float:
        pool = ThreadPoolExecutor(window) if window else self.pool
        started = time.perf_counter()
        list(pool.map(work, range(count)))
        return time.perf_counter() - started

    def close(self) -> None:
        """End it and Ray."""
        self.closer()
        self.ray.shutdown()


def memory_mib() -> float:
    """Private memory of the controller and the storage units; without Ray's own processes."""
    total = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            command = (status.parent / "cmdline").read_bytes()
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        except OSError:
            continue
        if command.startswith((b"ray::SimpleStorageUnit", b"ray::TransferQueueController")):
            total += int(fields["RssAnon"].split()[0])
    return total / 1024


if __name__ == "__main__":
    main()
