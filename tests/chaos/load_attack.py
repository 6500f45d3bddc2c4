"""A live broker process under nonsense or a flood, with a well-behaved worker and trainer beside it, measured.

`bin/chaos --hostile 100000` and `bin/chaos --floods 50` run this.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import yaml

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
sys.path[:0] = [str(ROOT / "tests" / "fixtures"), str(ROOT)]

from live_run import Process  # noqa: E402

from slimebus.bus.transport.client import Client  # noqa: E402
from slimebus.process.launch import free_port  # noqa: E402
from slimebus.view.run_status import ask_status  # noqa: E402

RUN = "load-attack"
BATCH_SIZE = 8
QUIET_S = 2.0
Command = list[str]
"""Of a hostile process: a script of this folder and its arguments."""
START_S = 60.0


class Report(msgspec.Struct, kw_only=True):
    """What an attack did. Throughputs in groups put a second; shares: attacked / quiet, of each round;
    others_percent: of the processors that other work took just before; sizes in bytes."""

    messages: int
    kinds: dict[str, int]
    answers: int
    seconds: float
    quiet_per_s: float
    attacked_per_s: float
    shares: list[float]
    others_percent: float
    rss_before: int
    rss_most: int
    rss_after: int
    log_bytes: int
    is_alive: bool
    problems: list[str]
    counted: dict[str, int]

    @property
    def share(self) -> float:
        """Of the quiet throughput that was left, in the best round: other work on the machine only lowers it."""
        return max(self.shares)


class Rate(msgspec.Struct):
    """Groups put, and the time it took."""

    groups: int = 0
    seconds: float = 0.0

    @property
    def per_s(self) -> float:
        """Groups a second."""
        return self.groups / self.seconds if self.seconds else 0.0

    def add(self, other: "Rate") -> None:
        """Count another measurement in."""
        self.groups += other.groups
        self.seconds += other.seconds


class LoadAttack:
    """The broker and the honest pair. As a context manager it leaves no process behind."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "prompts.jsonl").write_text("".join(f'{{"prompt": "{i}", "label": "{i}"}}\n' for i in range(2000)))
        self.others_percent = psutil.cpu_percent(1.0)
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self.folder, self.file = folder, folder / "run.yaml"
        self.file.write_text(yaml.safe_dump(config(folder, self.address)))
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.environment = environment
        log = folder / "broker.log"
        with log.open("ab") as out:
            command = [sys.executable, "-m", "slimebus", "broker", str(self.file)]
            self.broker = Process("broker", subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment), log)
        self.pair_log = folder / "pair.log"
        with self.pair_log.open("wb") as out:
            self.pair = subprocess.Popen(
                [sys.executable, str(HERE / "honest_pair.py"), self.address],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        self.peers: list[subprocess.Popen[bytes]] = []
        self.rss_most = 0

    def __enter__(self) -> "LoadAttack":
        return self

    def __exit__(self, *ending: object) -> None:
        for process in (*self.peers, self.pair, self.broker.popen):
            if process.poll() is None:
                process.kill()
            process.wait(10)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def lines(self) -> list[dict[str, Any]]:
        """What the pair said so far."""
        return [json.loads(line) for line in self.pair_log.read_text().splitlines() if line.startswith("{")]

    def rss(self) -> int:
        """Of the broker, without the pages of its store's file, which the system takes back as it likes."""
        status = Path(f"/proc/{self.broker.pid}/status").read_text()
        return 1024 * int(re.findall(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)[0])

    def nonsense(self, messages: int, *, peers: int = 1, seed: int = 1, rounds: int = 4) -> Report:
        """So many hostile messages, from `peers` processes at once."""
        share = str(messages // (rounds + 1) // peers)
        seeds = [seed + 1000, *(seed + number * peers for number in range(rounds))]
        return self._run([[["hostile_peer.py", self.address, str(first + i), share, RUN] for i in range(peers)] for first in seeds])

    def flood(self, seconds: float, floods: int) -> Report:
        """So many floods of status requests, one after the other; each ends with all its connections reset."""
        return self._run([[["deaf_flood.py", self.address, str(seconds)]] for _ in range(floods + 1)])

    def _run(self, attacks: Sequence[Sequence[Command]]) -> Report:
        """In turns: measure in quiet, measure under attack; the first attack is not measured."""
        self._await(lambda: self.lines() and self.lines()[-1]["put"] > 50, "the honest pair puts groups")
        self._start(attacks[0])
        self._measure(Rate(), self._are_over)
        told = self._told()  # buffers of sockets are allocated once: no growth
        rss_before, log_before = self.rss(), self.broker.log.stat().st_size
        self.rss_most = rss_before
        all_quiet, all_attacked = Rate(), Rate()
        shares = []
        for attack in attacks[1:]:
            quiet, attacked = Rate(), Rate()
            self._measure(quiet, lambda began: time.monotonic() - began > QUIET_S)
            self._start(attack)
            self._measure(attacked, self._are_over)
            told += self._told()
            shares.append(round(attacked.per_s / max(1.0, quiet.per_s), 3))
            all_quiet.add(quiet)
            all_attacked.add(attacked)
            if self.broker.popen.poll() is not None:
                break
        time.sleep(1.0)
        assert self.pair.stdin is not None
        status = ask_status(Client(self.address, name="watcher"), 10.0) if self.broker.popen.poll() is None else {}
        rss_after = self.rss() if status else 0
        self.pair.stdin.close()
        self.pair.wait(30)
        kinds: dict[str, int] = {}
        for one in told:
            for kind, number in one["sent"].items():
                kinds[kind] = kinds.get(kind, 0) + number
        return Report(
            messages=sum(kinds.values()),
            kinds=kinds,
            answers=sum(one["answers"] for one in told),
            seconds=round(all_attacked.seconds, 1),
            quiet_per_s=round(all_quiet.per_s, 1),
            attacked_per_s=round(all_attacked.per_s, 1),
            shares=shares,
            others_percent=self.others_percent,
            rss_before=rss_before,
            rss_most=self.rss_most,
            rss_after=rss_after,
            log_bytes=self.broker.log.stat().st_size - log_before,
            is_alive=bool(status),
            problems=self.lines()[-1].get("problems", ["the honest pair did not end in good order"]),
            counted=status.get("counted", {}),
        )

    def _start(self, commands: Sequence[Command]) -> None:
        for script, *words in commands:
            command = [sys.executable, str(HERE / script), *words]
            self.peers.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=self.environment))

    def _are_over(self, _: float) -> bool:
        if self.broker.popen.poll() is None:
            self.rss_most = max(self.rss_most, self.rss())
        return all(peer.poll() is not None for peer in self.peers)

    def _told(self) -> list[dict[str, Any]]:
        told = []
        for peer in self.peers:
            out, _ = peer.communicate(timeout=60)
            told.append(json.loads(out))
        self.peers = []
        return told

    def _measure(self, rate: "Rate", is_over: Callable[[float], bool]) -> None:
        """Add the groups put until it is over."""
        time.sleep(0.6)  # the pair speaks every half second: what it says next belongs to this phase
        began, first = time.monotonic(), self.lines()[-1]
        while not is_over(began):
            time.sleep(0.05)
            assert time.monotonic() - began < 600, "the attack takes longer than ten minutes"
        last = self.lines()[-1]
        rate.groups += last["put"] - first["put"]
        rate.seconds += last["time"] - first["time"]

    def _await(self, is_true: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + START_S
        while not is_true():
            assert time.monotonic() < deadline, (
                f"waited {START_S:.0f} s until {what}\n{self.broker.tail()}\n{self.pair_log.read_text()[-2000:]}"
            )
            assert self.broker.popen.poll() is None, self.broker.tail()
            time.sleep(0.1)


def config(folder: Path, address: str) -> dict[str, Any]:
    """A run that never ends, with room for everyone."""
    return {
        "name": RUN,
        "run_dir": str(folder / "run"),
        "broker": {"bind": address, "durability": "os", "http": "", "max_staleness": float("inf"), "buffer_capacity": 4096, "lease_s": 600},
        "data": {"prompt_data": [str(folder / "prompts.jsonl")]},
        "rollout": {"num_rollout": 1_000_000, "rollout_batch_size": BATCH_SIZE, "n_samples_per_prompt": 8},
    }
