"""A worker and a trainer written from docs/protocol.md alone take a run from start to end, over a broker that is killed in the middle."""

import ast
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from slimebus.launch import free_port

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
STEPS, BATCH_SIZE, SAMPLES = 8, 4, 3
FOREIGN = {"msgpack", "zmq", "standalone_bus", "standalone_samples"}

pytestmark = pytest.mark.integration


def test_the_standalone_clients_import_nothing_of_slimebus() -> None:
    for file in HERE.glob("standalone_*.py"):
        names = {n.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Import) for n in node.names}
        names |= {str(node.module) for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)}
        assert {name.split(".")[0] for name in names} <= FOREIGN | sys.stdlib_module_names, file.name


def _start(log: Path, *command: str) -> "subprocess.Popen[bytes]":
    with log.open("ab") as out:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.Popen([sys.executable, *command], stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environment)


def _config(folder: Path, address: str) -> dict[str, object]:
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"prompt {i}"}) + "\n" for i in range(500)))
    return {
        "name": "standalone",
        "run_dir": str(folder / "run"),
        "broker": {"bind": address, "heartbeat_s": 0.5, "lease_s": 5.0, "durability": "os"},
        "data": {"prompt_data": [str(folder / "prompts.jsonl")]},
        "rollout": {"num_rollout": STEPS, "rollout_batch_size": BATCH_SIZE, "n_samples_per_prompt": SAMPLES},
    }


def _await_line(log: Path, line: str, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 60
    while line not in log.read_text().splitlines():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, f"no {line!r} in {log.read_text()}"
        time.sleep(0.02)


@pytest.mark.timeout(200)
def test_a_worker_and_a_trainer_written_from_the_document_train_a_run_over_a_killed_broker(tmp_path: Path) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(_config(tmp_path, address)))
    broker_log, trainer_log, worker_log = (tmp_path / f"{name}.log" for name in ("broker", "trainer", "worker"))
    start_broker = (broker_log, "-m", "slimebus", "broker", str(tmp_path / "run.yaml"))
    broker = _start(*start_broker)
    trainer = _start(trainer_log, "-I", str(HERE / "standalone_trainer.py"), address, str(STEPS))
    worker = _start(worker_log, "-I", str(HERE / "standalone_worker.py"), address, "w1")
    try:
        _await_line(trainer_log, "step 2", trainer)
        broker.kill()
        broker.wait(10)
        broker = _start(*start_broker)
        for process, log in ((trainer, trainer_log), (worker, worker_log), (broker, broker_log)):
            assert process.wait(90) == 0, log.read_text()
    finally:
        for process in (broker, trainer, worker):
            process.kill()
            process.wait(10)
    told = ast.literal_eval(trainer_log.read_text().splitlines()[-1])
    assert (told["groups"], told["samples"]) == (STEPS * BATCH_SIZE, STEPS * BATCH_SIZE * SAMPLES)
    assert told["repeats"] > 0, "the broker was away: something had to be sent again"
    made = ast.literal_eval(worker_log.read_text().splitlines()[-1])
    assert made["put"]["accepted"] >= STEPS * BATCH_SIZE
    assert made["given_back"] > 0
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["step"], status["state"]) == (STEPS, "finished")
    assert status["counted"]["unused: shown"] == STEPS
    assert status["moves"]["leased>queued returned: I would rather not"] == made["given_back"]
