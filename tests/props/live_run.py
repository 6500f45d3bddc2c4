"""A tiny run of real processes: written, started, watched, faulted and swept away, each with a deadline."""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import yaml

from slimebus.commands.status import ask_status
from slimebus.errors import SlimebusError
from slimebus.launch import free_port
from slimebus.security.credentials import Credentials
from slimebus.transport.client import Client

ROOT = Path(__file__).parents[2]
MARK = "SLIMEBUS_TEST_MARK"
"""An environment variable that every process of a run inherits: whatever its parent or session, it is found by it."""
START_S = 60.0
"""Most seconds for anything that includes the start of a process; a loaded machine takes ten times an idle one's."""

SLOW_HOOK = """
import asyncio

async def generate(task, engines):
    await asyncio.sleep({seconds})
    return await engines.sample([task])
"""


class Process:
    """One `slimebus ROLE` (or any other command) with its output in a file. expected: exit codes that the test has brought about."""

    def __init__(self, name: str, command: list[str], log: Path, environment: dict[str, str]) -> None:
        self.name, self.log = name, log
        self.expected: set[int] = set()
        with log.open("ab") as out:
            self.popen = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True
            )
        self.pid = self.popen.pid

    def send(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def kill(self) -> None:
        """kill -9, of this process alone."""
        self.expected.add(-signal.SIGKILL)
        self.popen.kill()
        self.popen.wait(10)

    def wait(self, timeout_s: float = START_S) -> int:
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} still runs after {timeout_s:.0f} s\n{self.tail()}") from None

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def tail(self) -> str:
        return f"--- {self.log}\n" + "\n".join(self.text().splitlines()[-25:])

    def family(self) -> list[psutil.Process]:
        """This process and all below it."""
        me = psutil.Process(self.pid)
        return [me, *me.children(recursive=True)]


class Run:
    """A run's folder and processes. As a context manager it leaves no process behind."""

    def __init__(self, folder: Path, task: Path, **changes: Any) -> None:
        """changes: `section__field=value` of the config."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self.mark = secrets.token_hex(8)
        self.processes: list[Process] = []
        self.file = folder / "run.yaml"
        self.write(tiny_config(folder / "run", task, self.address), changes)
        self.run_dir = folder / "run"
        self.keys: Path | None = None
        self._client: Client | None = None

    def write(self, tree: dict[str, Any], changes: dict[str, Any]) -> None:
        for name, value in changes.items():
            section, _, field = name.rpartition("__")
            (tree.setdefault(section, {}) if section else tree)[field] = value
        self.file.write_text(yaml.safe_dump(tree, sort_keys=False))

    # --- processes ---

    def start(self, role: str, *flags: str, name: str = "") -> Process:
        """`slimebus ROLE run.yaml FLAGS`; a worker is called `name`."""
        named = ["--worker-name", name] if role == "rollout" and name else []
        return self.command(name or role, [sys.executable, "-m", "slimebus", role, str(self.file), *named, *flags])

    def command(self, name: str, command: list[str]) -> Process:
        count = sum(p.name == name for p in self.processes)
        log = self.folder / f"{name}-{count}.log"
        process = Process(name, command, log, os.environ | {MARK: self.mark, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
        self.processes.append(process)
        return process

    def alive(self) -> list[psutil.Process]:
        """Every living process of this run, whoever its parent is."""
        return [p for p in psutil.process_iter() if self._is_ours(p)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self.mark
        except psutil.Error:
            return False

    def assert_none_alive(self, within_s: float = 0.0, others: int = 0) -> None:
        deadline = time.monotonic() + within_s
        while len(left := self.alive()) > others and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(left) <= others, f"still running: {[(p.pid, p.cmdline()) for p in left]}"

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: object, problem: object, trace: object) -> None:
        if kind is not None:
            print(f"status: {json.dumps(self.status())}")
        if self._client is not None:
            self._client.close(goodbye=False)
        for process in self.alive():
            with contextlib.suppress(psutil.Error):
                process.kill()
        for process in self.processes:
            process.popen.wait(10)
            if kind is not None:
                print(process.tail())

    # --- watching ---

    def status(self) -> dict[str, Any]:
        """The broker's status; empty while it does not answer."""
        if self._client is None:
            credentials = Credentials(self.keys / "client.key") if self.keys else None
            self._client = Client(self.address, name="watcher", resend_s=0.5, credentials=credentials)
        with contextlib.suppress(SlimebusError):
            return ask_status(self._client, timeout_s=2.0)
        return {}

    def wait_for(self, what: str, is_true: Callable[[dict[str, Any]], Any], timeout_s: float = START_S) -> dict[str, Any]:
        """The first status for which `is_true`; fails at once when a process ended badly."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = self.status()
            if found and is_true(found):
                return found
            self.assert_healthy(what)
            time.sleep(0.05)
        raise AssertionError(f"no {what} within {timeout_s:.0f} s; status: {json.dumps(found)[:3000]}")

    def assert_healthy(self, what: str) -> None:
        for process in self.processes:
            code = process.popen.poll()
            assert code in (None, 0, *process.expected), f"waiting for {what}: {process.name} ended with {code}\n{process.tail()}"

    def complete(self, timeout_s: float = START_S) -> None:
        """Wait until every process ended: those that nobody killed with code 0, and nothing left behind."""
        deadline = time.monotonic() + timeout_s
        for process in self.processes:
            code = process.wait(max(1.0, deadline - time.monotonic()))
            assert code in (0, *process.expected), f"{process.name} ended with {code}\n{process.tail()}"
        self.assert_none_alive(within_s=5.0)

    # --- records ---

    def rows(self, name: str) -> list[dict[str, Any]]:
        file = self.run_dir / "metrics" / f"{name}.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []

    def final_status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run_dir / "status.json").read_text())
        return found

    def trained(self) -> dict[int, dict[str, Any]]:
        """What the surviving weights learned from: step -> the last record of its batch."""
        return {row["step"]: row for row in self.rows("batches")}

    def assert_accounted(self, num_steps: int, batch_size: int = 4) -> list[str]:
        """Each step has its batch, no group is in two, and every prompt taken from the source is trained, held, or ended by reason."""
        batches = self.trained()
        assert sorted(batches) == list(range(num_steps))
        ids = [group for row in batches.values() for group in row["groups"]]
        assert len(ids) == num_steps * batch_size
        assert len(set(ids)) == len(ids), "a group was trained twice"
        final = self.final_status()
        assert final["step"] == num_steps
        groups = final["groups"]
        unused = sum(groups[phase] for phase in ("queued", "leased", "ready", "assigned", "dropped", "dead"))
        assert final["source"]["position"] == len(ids) + unused, f"prompts vanished: {final['source']}, {groups}, {final['moves']}"
        return ids


def tiny_config(run_dir: Path, task: Path, address: str) -> dict[str, Any]:
    """Six steps of 4 groups of 4 samples of at most 16 tokens."""
    return {
        "name": "tiny",
        "run_dir": str(run_dir),
        "broker": {"bind": address, "durability": "os", "heartbeat_s": 0.3, "lease_s": 5, "finish_wait_s": 10, "connect_timeout_s": 60},
        "data": {"prompt_data": [f"{task}/rl.jsonl@[0:400]"]},
        "model": {"hf_checkpoint": str(task / "model")},
        "rollout": {
            "num_rollout": 6,
            "rollout_batch_size": 4,
            "n_samples_per_prompt": 4,
            "rollout_max_response_len": 16,
            "rm_type": "random",
            "max_running_groups": 4,
        },
        "optimizer": {"lr": 1.0e-4},
        "trainer": {"save_interval": 2, "tensorboard": False},
    }


def slow_hook(folder: Path, seconds: float) -> str:
    """The import path of a generate hook that sleeps before it samples: sampling is then the bottleneck, at a known rate."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "slow.py").write_text(SLOW_HOOK.format(seconds=seconds))
    return "slow.py:generate"


def clients(status: dict[str, Any], role: str) -> list[dict[str, Any]]:
    """The clients of a role that are present."""
    return [c for c in status["clients"] if c["role"] == role and c["state"] not in ("gone", "fenced")]


@contextlib.contextmanager
def cpu_share(processes: list[psutil.Process]) -> Iterator[Callable[[], dict[int, float]]]:
    """Inside: a function that tells, for each process, its CPU time since the start as a share of one core."""
    started = time.monotonic()
    before = {p.pid: sum(p.cpu_times()[:2]) for p in processes}

    def share() -> dict[int, float]:
        elapsed = time.monotonic() - started
        return {p.pid: (sum(p.cpu_times()[:2]) - before[p.pid]) / elapsed for p in processes}

    yield share
