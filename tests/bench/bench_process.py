"""The processes of a bench: a real broker by its command line, with a trainer that has resumed, and scripts of this folder."""

import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import psutil
import zmq
from bench_load import LINEAGE, Peer, get
from live_broker import LiveBroker
from slimebus_command import ENVIRONMENT

from slimebus.bus.messages import Ok, Publish, Resume, Status

BATCH_SIZE = 64
"""Groups a step."""
NUM_PROMPTS = 100_000


class BrokerProcess(LiveBroker):
    """A broker without a bound on staleness, with room for every group of a measurement; serving once this returns.

    start_s: seconds from its command to its first answer. core: the processor that all of it is bound to, None for any. keys: the folder
    of the keys that it asks for. broker and sections: fields of the config, beside those of every measurement.
    """

    def __init__(
        self, folder: Path, durability: str = "fsync", *, core: int | None = None, keys: Path | None = None, **sections: Any
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.durability, self.core, self.keys = durability, core, keys
        self.steps, self.serial = itertools.count(), itertools.count()
        self.context = zmq.Context()
        self.trainer: Peer | None = None
        self.start_s = 0.0
        broker = {"max_staleness": math.inf, "lease_s": 600, "heartbeat_s": 30, "buffer_capacity": 1_000_000, "durability": durability}
        sections["broker"] = broker | sections.get("broker", {})
        sections.setdefault("rollout", {"rollout_batch_size": BATCH_SIZE, "n_samples_per_prompt": 8, "num_rollout": 1_000_000})
        sections |= {"security": {"keys": str(keys)}} if keys else {}
        super().__init__(folder, num_prompts=NUM_PROMPTS, **sections)

    def start(self) -> None:
        """Run `slimebus broker` and wait for its first answer. Raises RuntimeError, with what it says, when it ends before."""
        started = time.perf_counter()
        with self.log.open("ab") as out:
            command = [sys.executable, "-m", "slimebus", "broker", str(self.file)]
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=ENVIRONMENT, preexec_fn=_on(self.core))
        asker = Peer(self.context, self.address, f"asker{next(self.serial)}", run="", key=self.key("client"))
        while not asker.socket.poll(20, zmq.POLLOUT):
            if self.process.poll() is not None:
                raise RuntimeError(self.log.read_text().strip().splitlines()[-1])
        asker.call(Status())
        asker.socket.close()
        self.start_s = time.perf_counter() - started

    def key(self, name: str) -> str:
        """The file of a key; empty without keys."""
        return str(self.keys / f"{name}.key") if self.keys else ""

    def train(self) -> "BrokerProcess":
        """Have a trainer join, resume and publish, so that workers may lease."""
        self.trainer = Peer(self.context, self.address, "trainer", role="trainer", key=self.key("trainer"))
        self.trainer.call(Resume(step=0, version=0, lineage=LINEAGE))
        self.publish(1)
        return self

    def publish(self, port: int) -> None:
        """Have the trainer announce version 0, which nobody can pull, at that port: a hint for all workers."""
        assert self.trainer is not None
        reply = self.trainer.call(Publish(lineage=LINEAGE, version=0, publishers=[f"tcp://127.0.0.1:{port}"], digest="d"))
        assert isinstance(reply, Ok), reply

    def load(self, **spec: Any) -> dict[str, Any]:
        """Run clients in a process of their own and give what they measured."""
        return load({"address": self.address, "name": f"n{next(self.serial)}-", **spec})

    def free(self, groups: int, chunk: int = 0) -> dict[str, Any]:
        """Take the batches of that many groups and commit them, so that their samples are freed; `chunk`: fetch them, so many a request."""
        steps = [next(self.steps) for _ in range(groups // BATCH_SIZE)]
        return get({"trainer": self.trainer, "step": steps[0], "steps": len(steps), "chunk": chunk})

    def rss_mib(self) -> float:
        """Resident memory that is the process's own: without the mapped file."""
        return private_mib(self.process.pid)

    def cpu_s(self) -> float:
        """Processor time that it has taken so far."""
        return sum(psutil.Process(self.process.pid).cpu_times()[:2])

    def commits(self) -> int:
        """Transactions of its store so far."""
        with lmdb.open(str(self.run_dir / "broker"), readonly=True, max_dbs=16) as env:
            return int(env.info()["last_txnid"])

    def close(self) -> None:
        """End it and remove its folder."""
        super().close()
        self.context.destroy(linger=0)
        shutil.rmtree(self.folder, ignore_errors=True)


class Crowd:
    """Workers at an even pace (bench_load.Paced) in so many processes; all have joined once this returns, in `joined_s` seconds."""

    def __init__(self, broker: BrokerProcess, processes: int, **spec: Any) -> None:
        """workers and sockets: of all processes together."""
        share = {name: spec.pop(name) // processes for name in ("workers", "sockets")}
        spec |= {"kind": "paced", "address": broker.address, "key": broker.key("rollout"), **share}
        commands = [script("bench_load.py", json.dumps({**spec, "name": f"crowd{i}-"})) for i in range(processes)]
        self._loads = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) for command in commands]
        told = self._lines()
        self.joined_s = max(one["joined"] for one in told) - min(one["began"] for one in told)

    def _lines(self) -> list[dict[str, Any]]:
        return [json.loads(load.stdout.readline()) for load in self._loads if load.stdout is not None]

    def finish(self) -> tuple[int, int, dict[str, list[list[float]]]]:
        """Requests sent, hints heard, and by kind of request (asked at, seconds until its answer), when their time is over."""
        told = self._lines()
        taken = {kind: [pair for one in told for pair in one["taken"][kind]] for kind in told[0]["taken"]}
        return sum(one["sent"] for one in told), sum(one["hints"] for one in told), taken

    def __enter__(self) -> "Crowd":
        return self

    def __exit__(self, *ending: object) -> None:
        for process in self._loads:
            process.kill()
            process.communicate()


def load(spec: dict[str, Any]) -> dict[str, Any]:
    """What bench_load.py measured with this specification."""
    core = spec.pop("core", None)
    return measured("bench_load.py", json.dumps(spec), core=core)


def script(name: str, *words: object) -> list[str]:
    """The command line of a script beside this one."""
    return [sys.executable, str(Path(__file__).with_name(name)), *map(str, words)]


def measured(name: str, *words: object, core: int | None = None) -> dict[str, Any]:
    """What such a script says in its last line, which is JSON. core: the processor that it is bound to."""
    done = subprocess.run(script(name, *words), stdout=subprocess.PIPE, text=True, check=True, env=ENVIRONMENT, preexec_fn=_on(core))
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def private_mib(pid: int) -> float:
    """Memory of a process that it shares with no file."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) / 1024


def _on(core: int | None) -> Callable[[], None] | None:
    return None if core is None else lambda: os.sched_setaffinity(0, {core})
