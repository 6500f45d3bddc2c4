"""A worker and a trainer written from docs/protocol.md alone take a run from start to end, over a broker that is killed in the middle."""

import ast
import json
import sys
from pathlib import Path

import pytest
from live_broker import LiveBroker
from waiting import wait_until

HERE = Path(__file__).parent
STEPS, BATCH_SIZE, SAMPLES = 8, 4, 3
FOREIGN = {"msgpack", "zmq", "standalone_bus"}

pytestmark = pytest.mark.integration


def test_the_standalone_clients_import_nothing_of_slimebus() -> None:
    for file in HERE.glob("standalone_*.py"):
        names = {n.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Import) for n in node.names}
        names |= {str(node.module) for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)}
        assert {name.split(".")[0] for name in names} <= FOREIGN | sys.stdlib_module_names, file.name


@pytest.mark.timeout(400)
def test_a_worker_and_a_trainer_written_from_the_document_train_a_run_over_a_killed_broker(tmp_path: Path) -> None:
    limits = {"heartbeat_s": 0.5, "lease_s": 5.0}
    rollout = {"num_rollout": STEPS, "rollout_batch_size": BATCH_SIZE, "n_samples_per_prompt": SAMPLES}
    with LiveBroker(tmp_path, num_prompts=500, broker=limits, rollout=rollout) as broker:
        trainer_log, worker_log = tmp_path / "trainer.log", tmp_path / "worker.log"
        trainer = broker.start_beside("-I", str(HERE / "standalone_trainer.py"), broker.address, str(STEPS), log=trainer_log)
        worker = broker.start_beside("-I", str(HERE / "standalone_worker.py"), broker.address, "w1", log=worker_log)
        wait_until("step 2", lambda: "step 2" in trainer_log.read_text().splitlines() or trainer.poll() is not None, 60)
        broker.kill()
        broker.start()
        for process, log in ((trainer, trainer_log), (worker, worker_log), (broker.process, broker.log)):
            assert process.wait(90) == 0, log.read_text()
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
