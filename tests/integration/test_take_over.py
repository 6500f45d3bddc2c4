"""A place that is taken: who is alive keeps it, who was killed is back at once, and --take-over replaces."""

from pathlib import Path

import pytest
from live_run import Run
from scripted import beat

from slimebus.bus.messages import Heartbeat
from slimebus.bus.transport.client import Client

pytestmark = pytest.mark.integration

BEAT_S = 2.0
WAITS = "waits for a sign of"


def contents(folder: Path) -> dict[Path, bytes]:
    """What a trainer or worker could write to; the broker's own files change by themselves."""
    files = [file for file in folder.rglob("*") if file.is_file() and "broker" not in file.relative_to(folder).as_posix()]
    return {file: file.read_bytes() for file in files}


def test_a_second_process_is_refused_a_killed_one_is_back_at_once_and_take_over_replaces(tmp_path: Path, task: Path) -> None:
    with Run(tmp_path, task, slow_s=0.3, broker__heartbeat_s=BEAT_S, rollout__num_rollout=10_000) as run:
        run.start("broker")
        trainer, worker = run.start("trainer"), run.start("rollout", name="w1")
        before = run.wait_for("a trained step", lambda s: s["step"] >= 1)
        for role, name, living in (("trainer", "", trainer), ("rollout", "w1", worker)):
            second = run.start(role, name=name)
            second.ends(2)
            assert f"(process {living.pid} on host " in second.text()
            assert WAITS in second.text()
            assert "is alive; --take-over replaces it" in second.text()
        after = run.wait_for("the first to go on", lambda s: s["step"] >= before["step"] + 3)
        assert after["lineage"] == before["lineage"]

        trainer.kill()
        again = run.start("trainer")
        back = run.wait_for("a new lineage", lambda s: s["lineage"] not in ("", before["lineage"]))
        assert WAITS not in again.text(), "its first hello was welcomed"
        worker.kill()
        worker = run.start("rollout", name="w1")
        run.wait_for("a step of the new ones", lambda s: s["step"] > back["step"])
        assert WAITS not in worker.text()

        again.expected.add(1)
        newest = run.start("trainer", "--take-over")
        assert again.wait() == 1, again.tail()
        assert "taken the place of" in again.text()
        run.wait_for("the newest to train", lambda s: s["lineage"] not in ("", before["lineage"], back["lineage"]) and s["step"] >= 1)
        assert newest.popen.poll() is None


@pytest.mark.parametrize("role", ["trainer", "rollout"])
def test_a_refused_process_writes_nothing_into_the_run_directory(tmp_path: Path, task: Path, role: str) -> None:
    with Run(tmp_path, task, broker__heartbeat_s=BEAT_S) as run:
        run.start("broker")
        client = Client(run.address, name="trainer" if role == "trainer" else "w1")
        try:
            client.join(role, timeout_s=60)
            beat(client, 0.2)
            run.wait_for("the page's config", lambda s: (run.run_dir / "config.json").exists())
            found = contents(run.run_dir)
            second = run.start(role, name="" if role == "trainer" else "w1")
            second.ends(2)
            assert contents(run.run_dir) == found
            assert client.call(Heartbeat(), timeout_s=5)
        finally:
            client.close(goodbye=False)


def test_a_second_up_in_the_folder_of_a_running_one_is_refused_before_it_writes(tmp_path: Path, task: Path) -> None:
    with Run(tmp_path, task) as run:
        run.start("broker")
        run.wait_for("a broker", lambda s: (run.run_dir / "config.json").exists())
        found = contents(run.run_dir)
        up = run.start("up", "--bind", "tcp://127.0.0.1:0")
        up.ends(2)
        assert f"the run in {run.run_dir} is running" in up.text()
        assert contents(run.run_dir) == found
        assert not (run.run_dir / "logs").exists()
