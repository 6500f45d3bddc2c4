"""A real broker for `bin/bench broker`: started by its command line on a run of its own, with a trainer that has resumed."""

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import zmq
from bench_load import LINEAGE, Peer, get

from slimebus.bus import envelope
from slimebus.bus.messages import Publish, Resume, Status
from slimebus.process.launch import free_port

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
START_S = 120.0
BATCH_SIZE = 64
"""Groups a step."""


class BrokerProcess:
    """A broker under `folder`, serving once this returns. `start_s`: seconds from its command to its first answer.

    core: the processor that all of it is bound to, None for any. fields: of the config, beside those of every measurement.
    """

    def __init__(self, folder: Path, durability: str, *, prompts: Path, core: int | None = None, **fields: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.durability, self.core = folder, durability, core
        self.prompts, self.fields = prompts, fields
        self.steps, self.serial = itertools.count(), itertools.count()
        self.context = zmq.Context()
        self.trainer: Peer | None = None
        self.start_s = 0.0
        self.start()

    def start(self) -> None:
        """Run `slimebus broker` and wait for its first answer."""
        self.address = f"tcp://127.0.0.1:{free_port()}"
        started = time.perf_counter()
        self.process = subprocess.Popen(
            command(self.folder, self.prompts, self.address, self.durability, self.fields),
            stdout=subprocess.DEVNULL,
            stderr=(self.folder / "broker.log").open("ab"),
            preexec_fn=_on(self.core),
            env=ENVIRONMENT,
        )
        self.status()
        self.start_s = time.perf_counter() - started

    def status(self) -> dict[str, Any]:
        """The broker's status. Raises RuntimeError when it has ended."""
        asker, deadline = Peer(self.context, self.address, f"asker{next(self.serial)}", run=""), time.perf_counter() + START_S
        asker.send(Status())
        while not asker.socket.poll(50):
            if self.process.poll() is not None or time.perf_counter() > deadline:
                raise RuntimeError(f"the broker did not answer; its log: {(self.folder / 'broker.log').read_text()[-2000:]}")
        frames = asker.socket.recv_multipart()
        asker.socket.close()
        envelope.decode(frames)
        return json.loads(frames[1])

    def train(self) -> "BrokerProcess":
        """Have a trainer join, resume and publish, so that workers may lease."""
        self.trainer = trainer = Peer(self.context, self.address, "trainer", role="trainer")
        trainer.call(Resume(step=0, version=0, lineage=LINEAGE))
        trainer.call(Publish(lineage=LINEAGE, version=0, publishers=["tcp://127.0.0.1:1"], digest="d"))
        return self

    def load(self, **spec: Any) -> dict[str, Any]:
        """Run clients in a process of their own and give what they measured."""
        return load({"address": self.address, "name": f"n{next(self.serial)}-", **spec})

    def free(self, groups: int, chunk: int = 0) -> dict[str, Any]:
        """Take the batches of that many groups and commit them, so that their samples are freed; `chunk`: fetch them, so many a request."""
        steps = groups // BATCH_SIZE
        first = next(self.steps)
        for _ in range(steps - 1):
            next(self.steps)
        return get({"trainer": self.trainer, "step": first, "steps": steps, "chunk": chunk})

    def rss_mib(self) -> float:
        """Resident memory that is the process's own: without the mapped file."""
        return private_mib(self.process.pid)

    def cpu_s(self) -> float:
        """Processor time that it has taken so far."""
        user, system = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def commits(self) -> int:
        """Transactions of its store so far."""
        with lmdb.open(str(self.folder / "run" / "broker"), readonly=True, max_dbs=16) as env:
            return int(env.info()["last_txnid"])

    def close(self) -> None:
        """End it and remove its folder."""
        self.stop()
        self.context.destroy(linger=0)
        shutil.rmtree(self.folder, ignore_errors=True)

    def stop(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()


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


def command(folder: Path, prompts: Path, address: str, durability: str, fields: dict[str, Any]) -> list[str]:
    """The command line of a broker without a bound on staleness, with room for every group of a measurement."""
    config = folder / "run.yaml"
    if not config.exists():
        config.write_text(
            f"name: bench\nrun_dir: {folder / 'run'}\ndata: {{prompt_data: [{prompts}], rollout_shuffle: false}}\n"
            f"rollout: {{rollout_batch_size: {BATCH_SIZE}, n_samples_per_prompt: 8, num_rollout: 1000000}}\n"
            f"broker: {{max_staleness: .inf, lease_s: 600, heartbeat_s: 30, buffer_capacity: 1000000, http: ''"
            f", durability: {durability}}}\n"
        )
    own = [word for name, value in fields.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return [sys.executable, "-m", "slimebus", "broker", str(config), "--bind", address, *own]


def write_prompts(path: Path, count: int) -> Path:
    """A jsonl file of that many prompts of about 200 bytes."""
    filler = "what is the sum of the digits of this number " * 3
    with path.open("w") as file:
        for i in range(count):
            file.write(f'{{"prompt": "{filler}{i}", "label": "{i % 97}", "metadata": {{"id": {i}}}}}\n')
    return path


def scratch() -> Path:
    """A new folder for one broker."""
    return Path(tempfile.mkdtemp(prefix="slimebus-bench-"))
