"""A live broker process under nonsense or a flood, with a well-behaved worker and trainer beside it, measured.

`bin/chaos --hostile 100000` and `bin/chaos --floods 50` run this.
"""

import json
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
sys.path[:0] = [str(ROOT / "tests" / "fixtures"), str(ROOT)]

from live_broker import LiveBroker  # noqa: E402
from slimebus_command import ENVIRONMENT  # noqa: E402
from waiting import wait_until  # noqa: E402

BATCH_SIZE = 8
QUIET_S = 2.0
Command = list[str]
"""Arguments of a hostile process."""


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
        """A run that never ends, with room for everyone."""
        folder.mkdir(parents=True, exist_ok=True)
        self.others_percent = psutil.cpu_percent(1.0)
        broker = {"max_staleness": float("inf"), "buffer_capacity": 4096, "lease_s": 600}
        rollout = {"num_rollout": 1_000_000, "rollout_batch_size": BATCH_SIZE, "n_samples_per_prompt": 8}
        self.broker = LiveBroker(folder, num_prompts=2000, broker=broker, rollout=rollout)
        self.pair_log = folder / "pair.log"
        self.pair = self.broker.start_beside(str(HERE / "honest_pair.py"), self.broker.address, log=self.pair_log)
        self.peers: list[subprocess.Popen[bytes]] = []
        self.rss_most = 0

    def __enter__(self) -> "LoadAttack":
        return self

    def __exit__(self, *ending: object) -> None:
        for peer in self.peers:
            peer.kill()
            peer.communicate()
        self.broker.close()

    def lines(self) -> list[dict[str, Any]]:
        """What the pair said so far."""
        return [json.loads(line) for line in self.pair_log.read_text().splitlines() if line.startswith("{")]

    @property
    def is_alive(self) -> bool:
        """Whether the broker has not ended."""
        return self.broker.process.poll() is None

    def rss(self) -> int:
        """Of the broker, without the pages of its store's file, which the system takes back as it likes."""
        status = Path(f"/proc/{self.broker.process.pid}/status").read_text()
        return 1024 * int(re.findall(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)[0])

    def nonsense(self, messages: int, *, peers: int = 1, seed: int = 1, rounds: int = 4) -> Report:
        """So many hostile messages, from `peers` processes at once."""
        share = str(messages // (rounds + 1) // peers)
        seeds = [seed + 1000, *(seed + number * peers for number in range(rounds))]
        return self._run([[["nonsense", self.broker.address, str(first + i), share] for i in range(peers)] for first in seeds])

    def flood(self, seconds: float, floods: int) -> Report:
        """So many floods of status requests, one after the other; each ends with all its connections reset."""
        return self._run([[["flood", self.broker.address, str(seconds)]] for _ in range(floods + 1)])

    def _run(self, attacks: Sequence[Sequence[Command]]) -> Report:
        """In turns: measure in quiet, measure under attack; the first attack is not measured."""
        wait_until("groups of the honest pair", lambda: self.lines() and self.lines()[-1]["put"] > 50)
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
            if not self.is_alive:
                break
        time.sleep(1.0)
        is_alive = self.is_alive
        counted, rss_after = (self.broker.status()["counted"], self.rss()) if is_alive else ({}, 0)
        self.pair.send_signal(signal.SIGTERM)
        self.pair.wait(30)
        kinds = sum((Counter(one["sent"]) for one in told), Counter[str]())
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
            is_alive=is_alive,
            problems=self.lines()[-1].get("problems", ["the honest pair did not end in good order"]),
            counted=counted,
        )

    def _start(self, commands: Sequence[Command]) -> None:
        for words in commands:
            command = [sys.executable, str(HERE / "hostile_peer.py"), *words]
            self.peers.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=ENVIRONMENT))

    def _are_over(self, _: float) -> bool:
        if self.is_alive:
            self.rss_most = max(self.rss_most, self.rss())
        return all(peer.poll() is not None for peer in self.peers)

    def _told(self) -> list[dict[str, Any]]:
        told = [json.loads(peer.communicate(timeout=60)[0]) for peer in self.peers]
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
