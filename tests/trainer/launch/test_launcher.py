"""The launcher of a node: its ranks end together, start again together, and nodes that do not fit are named before anything starts."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from slimebus.bus.errors import SlimebusError, Unreachable, UsageError
from slimebus.cli.root import exit_code
from slimebus.process.launch import free_port
from trainer.launch import launcher
from trainer.launch.launcher import Launcher, NodeConnection, rendezvous, tell_others
from trainer.launch.plan import LaunchPlan


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """A launcher keeps its handlers: its process ends with it."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def ranks_are(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes each rank a Python that runs this code, with its number in RANK."""

    def choose(code: str) -> None:
        def start(plan: LaunchPlan, arguments: object, port: int, local: int, error: IO[bytes]) -> "subprocess.Popen[bytes]":
            environment = os.environ | {"RANK": str(plan.node_rank * plan.ranks_here + local), "ERROR": str(error.fileno())}
            command = [sys.executable, "-S", "-c", f"import os, sys, time; {code}"]
            return subprocess.Popen(command, env=environment, pass_fds=[error.fileno()])

        monkeypatch.setattr(launcher, "_start", start)

    return choose


ONE = "os.environ['RANK'] == '1' and "


@pytest.mark.parametrize(
    ("ranks", "code", "max_restarts", "exit_code", "starts"),
    [
        pytest.param(2, "0", 0, 0, 1, id="all end well"),
        pytest.param(2, f"{ONE} sys.exit(3); time.sleep(60)", 0, 3, 1, id="one that fails ends the others and gives its code"),
        pytest.param(2, f"{ONE} os.kill(os.getpid(), 9); time.sleep(60)", 0, 1, 1, id="one that is killed gives 1"),
        pytest.param(2, f"{ONE} sys.exit(1); time.sleep(60)", 2, 1, 3, id="a failed set starts again as often as asked"),
        pytest.param(1, "starts < 2 and sys.exit(1)", 3, 0, 2, id="a set that recovers ends well"),
        pytest.param(1, "sys.exit(2)", 3, 2, 1, id="a mistake of the user is not tried again"),
    ],
)
def test_ranks_end_together_and_start_again(
    ranks_are: Callable[[str], None], tmp_path: Path, ranks: int, code: str, max_restarts: int, exit_code: int, starts: int
) -> None:
    ranks_are(f"f = open('{tmp_path}/' + os.environ['RANK'], 'a'); f.write('x'); f.close(); starts = os.path.getsize(f.name); {code}")
    assert Launcher(LaunchPlan("", ranks_here=ranks), [], max_restarts).run() == exit_code
    assert (tmp_path / str(ranks - 1)).read_text() == "x" * starts


def test_a_set_that_starts_again_replaces_no_living_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def start(plan: LaunchPlan, arguments: list[str], port: int, local: int, error: IO[bytes]) -> "subprocess.Popen[bytes]":
        started.append(arguments)
        return subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(1)"])

    monkeypatch.setattr(launcher, "_start", start)
    assert Launcher(LaunchPlan("", ranks_here=1), ["trainer", "--take-over", "run.yaml"], 1).run() == 1
    assert started == [["trainer", "--take-over", "run.yaml"], ["trainer", "run.yaml"]]


# --- nodes that meet ---


class OtherNode:
    """Node 0 in this thread, another node in a second one; what the other raised or got."""

    def __init__(self, other: LaunchPlan) -> None:
        self.peers: list[NodeConnection] = []
        self.raised: SlimebusError | None = None
        self._thread = threading.Thread(target=self._join, args=(other,))
        self._thread.start()

    def _join(self, plan: LaunchPlan) -> None:
        try:
            self.peers = rendezvous(plan)
        except SlimebusError as bad:
            self.raised = bad

    def end(self) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive()
        for peer in self.peers:
            peer.close()


def plans(**changed: Any) -> tuple[LaunchPlan, LaunchPlan]:
    """Of node 0, and of node 1 with some changes."""
    given = {"ranks_here": 2, "nnodes": 2, "master_port": free_port()}
    return LaunchPlan("", **given), LaunchPlan("", **{**given, "node_rank": 1, **changed})


def test_nodes_meet_and_talk() -> None:
    first, second = plans()
    other = OtherNode(second)
    (peer,) = rendezvous(first)
    peer.send(start=1)
    other._thread.join(20)
    assert list(other.peers[0].receive(20)) == [{"start": 1}]
    other.peers[0].send(leave=True)
    assert list(peer.receive(20)) == [{"leave": True}]
    other.end()
    assert list(peer.receive(20)) == [{"gone": True}]
    peer.close()


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"ranks_here": 4}, "does not fit: it says .*'ranks': 4.*give every node the same --nnodes and --nproc-per-node"),
        ({"nnodes": 3}, "'nnodes': 3"),
    ],
)
def test_a_node_that_was_started_differently_is_named(changed: dict, text: str) -> None:
    first, second = plans(**changed)
    other = OtherNode(second)
    with pytest.raises(UsageError, match=text):
        rendezvous(first)
    other.end()


def test_the_problem_of_node_0_is_told_to_the_others(caplog: pytest.LogCaptureFixture) -> None:
    """They would wait ten minutes for it."""
    first, second = plans()
    codes: list[int] = []

    def follow() -> None:
        with contextlib.closing(rendezvous(second)[0]) as peer:
            codes.append(Launcher(second, [], 0)._follow_node_0(peer))

    other = threading.Thread(target=follow)
    other.start()
    tell_others(first, "model.hf_checkpoint: no model at /models/x")
    other.join(20)
    assert codes == [2]
    assert "node 0: model.hf_checkpoint: no model at /models/x" in caplog.messages


def test_the_problem_of_a_node_is_told_by_node_0() -> None:
    first, second = plans()
    other = threading.Thread(target=tell_others, args=(second, "model.hf_checkpoint: no model at /models/x"))
    other.start()
    with pytest.raises(UsageError, match=r"node 1 \(127.0.0.1\): model.hf_checkpoint: no model at /models/x"):
        rendezvous(first)
    other.join(20)


def test_a_node_whose_config_does_not_load_tells_node_0_why(tmp_path: Path) -> None:
    """It would wait ten minutes for it."""
    (tmp_path / "run.yaml").write_text("optimizer: {lr: fast}\n")
    first, second = plans()
    words = ["trainer", str(tmp_path / "run.yaml"), "--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1"]
    command = [sys.executable, "-m", "slimebus", *words, "--master-port", str(second.master_port)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as other:
        with pytest.raises(UsageError, match=r"node 1 \(127.0.0.1\): .*optimizer.lr: .*fast"):
            rendezvous(first)
        assert other.wait(60) == 2
        assert other.stderr is not None
        assert "optimizer.lr" in other.stderr.read()


# --- nodes that run ---


@contextlib.contextmanager
def other_launcher(plan: LaunchPlan) -> Iterator[list[int]]:
    """A second thread's launcher; its exit code."""
    codes: list[int] = []

    def follow() -> None:
        second = Launcher(plan, [], 0)
        second.peers = rendezvous(plan)
        with contextlib.closing(second.peers[0]):
            codes.append(second._follow_node_0(second.peers[0]))
            assert second.ranks is not None
            second.ranks.stop()

    thread = threading.Thread(target=follow)
    thread.start()
    yield codes
    thread.join(20)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("failing", "code", "text"),
    [
        ("os.write(int(os.environ['ERROR']), b'ValueError: no'), sys.exit(2)", 2, "exit code 2: ValueError: no"),
        ("os.kill(os.getpid(), 9)", 1, "SIGKILL"),
    ],
)
@pytest.mark.parametrize("rank", [1, 3])
def test_the_rank_that_fails_first_is_named_on_all_nodes(
    ranks_are: Callable[[str], None], caplog: pytest.LogCaptureFixture, rank: int, failing: str, code: int, text: str
) -> None:
    """The other ranks are ended by SIGKILL, also those before it on its node: its exit code is the one that counts."""
    ranks_are(f"os.environ['RANK'] == '{rank}' and ({failing}); time.sleep(60)")
    first, second = plans()
    with other_launcher(second) as codes:
        assert Launcher(first, [], 0).run() == code
    assert codes == [code]
    said = [message.partition("so all are ended: ")[2] for message in caplog.messages if "so all are ended" in message]
    assert said == [f"rank {rank} on {socket.gethostname()} ended with {text}"] * 2


@pytest.mark.parametrize(("problem", "is_final"), [(Unreachable("no broker answers"), False), (UsageError("no such option"), True)])
def test_a_trainer_that_lost_its_broker_may_be_started_again(problem: SlimebusError, is_final: bool) -> None:
    assert (exit_code(problem) in launcher.FINAL_CODES) == is_final
