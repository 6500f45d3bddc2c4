"""Workers and engines that come and go by command while the run goes on."""

import json
import os
import signal
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import slimebus_command
from live_run import Run, clients

from rollout.engines.backends import embedded_engine
from rollout.engines.sglang.process import EngineProcess

pytestmark = pytest.mark.integration


def slimebus(run: Run, *words: str) -> str:
    """What a user would type, and what it says."""
    done = slimebus_command.slimebus(*words, "--broker", run.address)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def workers(status: dict[str, Any]) -> set[str]:
    return {client["name"] for client in clients(status, "rollout") if client["state"] == "serving"}


def test_two_workers_of_up_grow_to_six_and_shrink_to_one_while_steps_go_on(tmp_path: Path, task: Path) -> None:
    with Run(tmp_path, task, rollout__num_rollout=100_000, broker__max_staleness=4, trainer__save_interval=1000) as run:
        run.command("up", [sys.executable, "-m", "slimebus", "up", str(run.file), "--workers", "2"])
        run.wait_for("two workers", lambda s: len(workers(s)) == 2 and s["step"] >= 1)
        for number in range(3, 7):
            run.start("rollout", name=f"more-{number}")
        grown = run.wait_for("six workers", lambda s: len(workers(s)) == 6)
        run.wait_for("steps with six", lambda s: s["step"] >= grown["step"] + 2)
        for name in ("worker-2", "more-3", "more-4", "more-5", "more-6"):
            assert f"{name}: it has left" in slimebus(run, "drain", name)
        shrunk = run.wait_for("one worker", lambda s: workers(s) == {"worker-1"})
        after = run.wait_for("steps with one", lambda s: s["step"] >= shrunk["step"] + 2)
        assert not any("lost" in move or "expired" in move for move in after["moves"]), after["moves"]


@pytest.fixture
def two(task: Path, tmp_path: Path) -> Iterator[list[EngineProcess]]:
    """Somebody else's engines."""
    engines = [embedded_engine(task / "model", tmp_path / f"engine-{i}.log") for i in range(2)]
    for engine in engines:
        engine.start()
    yield engines
    for engine in engines:
        for process in psutil.Process(engine.pid).children():
            process.send_signal(signal.SIGCONT)
        engine.stop()


def test_engines_are_attached_hang_and_are_detached_while_it_runs_and_no_group_is_lost(
    tmp_path: Path, task: Path, two: list[EngineProcess]
) -> None:
    first, second = two
    with Run(tmp_path, task, rollout__num_rollout=100_000, broker__max_staleness=4, engine__engine_url=[first.url]) as run:
        *_, worker = run.start_all("w")
        run.wait_for("a step", lambda s: s["step"] >= 1)

        def engines() -> dict[str, Any]:
            return {engine["url"]: engine for engine in json.loads(slimebus(run, "engines", "ls", "--json"))}

        assert "slimebus" in slimebus(run, "engines", "attach", second.url)
        run.wait_for("the second to serve", lambda s: [e["state"] for e in clients(s, "rollout")[0]["engines"]] == ["serving"] * 2)
        assert engines()[second.url]["is_owned"] is False
        server = psutil.Process(first.pid).children()[0].pid
        os.kill(server, signal.SIGSTOP)
        begun, at = time.monotonic(), run.status()["step"]
        run.wait_for("steps beside an engine that hangs", lambda s: s["step"] >= at + 3)
        assert time.monotonic() - begun < 40
        os.kill(server, signal.SIGCONT)
        run.wait_for("both again", lambda s: [e["state"] for e in clients(s, "rollout")[0]["engines"]] == ["serving"] * 2)
        assert slimebus(run, "engines", "detach", first.url).strip() == f"w: {first.url} is detached"
        assert list(engines()) == [second.url]
        assert psutil.pid_exists(server), "it is not ours to end"
        at = run.status()["step"]
        status = run.wait_for("steps on the other", lambda s: s["step"] >= at + 2)
        assert status["groups"]["dead"] == 0
        worker.send(signal.SIGTERM)
        worker.wait()
        for engine in two:
            with urllib.request.urlopen(f"{engine.url}/ready") as answer:
                assert answer.status == 200, "left paused"
