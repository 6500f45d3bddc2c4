"""kill -9 or SIGTERM of each kind of process in the middle of a run: it completes, and every group is trained once or accounted for."""

import signal
import time
from pathlib import Path

import psutil
import pytest
from live_run import Run, clients
from slimebus_command import said
from waiting import wait_until
from weight_run import ENGINE_KEY, ask

pytestmark = pytest.mark.integration


def test_a_killed_engine_is_replaced_and_another_worker_finishes_what_a_killed_one_had(tmp_path: Path, task: Path) -> None:
    with Run(tmp_path, task, slow_s=0.3, constants={"CLIENT_TIMEOUT_S": 8}, rollout__num_rollout=8) as run:
        *_, first = run.start_all()
        before = run.wait_for("a trained step", lambda s: s["step"] >= 1)
        first.engine().kill()
        run.wait_for("another engine", lambda s: first.text().count("started engine") == 2)
        run.wait_for("groups in w1's hands again", lambda s: s["step"] > before["step"] and s["groups"]["leased"] >= 2)
        family = first.family()
        assert len(family) >= 2, "the worker has an engine below it"
        first.send(signal.SIGSTOP)  # so that what it holds cannot change between looking and killing
        held = run.wait_for("a status", lambda s: True)["groups"]["leased"]
        first.kill()
        _, alive = psutil.wait_procs(family, timeout=10)
        assert not alive, f"outlived their worker: {[p.cmdline() for p in alive]}"
        run.start("rollout", name="w2")
        run.complete(8)
        moves = run.final_status()["moves"]
        assert held >= 1
        assert sum(count for move, count in moves.items() if move.startswith("leased>queued")) >= held, moves


def test_a_worker_told_to_end_gives_its_groups_back_at_once(tmp_path: Path, task: Path) -> None:
    with Run(tmp_path, task, slow_s=600, broker__lease_s=60) as run:
        _, trainer, worker = run.start_all()
        run.wait_for("groups in w1's hands", lambda s: s["groups"]["leased"] >= 4)
        worker.send(signal.SIGTERM)
        assert worker.wait(30) == 0, worker.tail()  # its leases last 60 s, its groups take 600
        found = run.wait_for("queued groups", lambda s: s["groups"]["queued"] >= 4, timeout_s=5)
        assert found["groups"]["leased"] == 0
        assert not clients(found, "rollout")
        assert {move: count for move, count in found["moves"].items() if "worker left" in move}, found["moves"]
        trainer.kill()


def test_up_starts_a_killed_broker_again_and_completes_the_run(tmp_path: Path, task: Path) -> None:
    with Run(tmp_path, task, slow_s=0.3) as run:
        up = run.start("up")
        before = run.wait_for("two trained steps", lambda s: s["step"] >= 2)
        port = int(run.address.rpartition(":")[2])
        (broker,) = [p for p in up.family() for c in p.net_connections() if (c.status, c.laddr.port) == (psutil.CONN_LISTEN, port)]
        broker.kill()
        after = run.wait_for("the broker again", lambda s: up.text().count("broker was killed by SIGKILL") == 1)
        assert (after["step"] >= before["step"], after["lineage"]) == (True, before["lineage"])
        run.complete(6)
        assert [row["step"] for row in run.rows("batches")] == list(range(6)), "no step was trained twice"


def test_a_killed_trainer_resumes_from_its_checkpoint_in_a_new_lineage(tmp_path: Path, task: Path) -> None:
    with Run(tmp_path, task, slow_s=0.3, rollout__num_rollout=8, trainer__save_interval=3) as run:
        _, trainer, _ = run.start_all()
        before = run.wait_for("a step after the checkpoint", lambda s: s["oldest_checkpoint"] == 3 and s["step"] >= 5)
        trainer.kill()
        run.start("trainer")
        after = run.wait_for("a new lineage", lambda s: s["lineage"] != before["lineage"])
        assert before["step"] > after["step"] >= 3
        run.complete(8)
        rows = run.rows("batches")
        lineages = list(dict.fromkeys(row["lineage"] for row in rows))
        assert len(lineages) == 2
        assert [row["step"] for row in rows if row["lineage"] == lineages[1]] == list(range(3, 8)), "it goes on where the checkpoint ends"
        assert "resumed at step 3" in run.processes[-1].text()
        kept = {row["step"]: set(row["groups"]) for row in rows if row["lineage"] == lineages[0]}
        again = {group for row in rows if row["lineage"] == lineages[1] for group in row["groups"]}
        assert not again & (kept[0] | kept[1] | kept[2]), "what the checkpoint holds is not trained again"
        assert kept[3] <= again, "what was trained after the checkpoint is trained again"


def test_a_run_whose_workers_never_get_the_last_version_ends_and_says_why(tmp_path: Path, task: Path) -> None:
    evaluation = {"datasets": {"held": {"path": f"{task}/heldout.jsonl@[0:12]"}}, "skip_eval_before_train": True}
    with Run(tmp_path, task, slow_s=2.0, constants={"CLIENT_TIMEOUT_S": 8}, rollout__num_rollout=1, eval=evaluation) as run:
        run.start("broker")
        trainer, worker = run.start("trainer"), run.start("rollout", name="w1")
        run.wait_for("the groups of the only step in w1's hands", lambda s: s["groups"]["leased"] >= 4)
        trainer.send(signal.SIGSTOP)
        run.wait_for("those groups", lambda s: s["groups"]["ready"] + s["groups"]["assigned"] >= 4)
        worker.send(signal.SIGSTOP)
        trainer.send(signal.SIGCONT)
        run.wait_for("the end of training", lambda s: s["state"] == "evaluating" and s["version"] == 1)
        for _ in range(2):  # the second one ends its wait for the others
            trainer.send(signal.SIGINT)
            time.sleep(1)
        worker.send(signal.SIGCONT)
        why = "no connected worker serves version 1 and the trainer that could serve it has left"
        waiting = f"every step is trained; 0 of 12 prompts are evaluated at version 1; {why}; this evaluation ends in "
        run.wait_for("who is waited for", lambda s: any(line.startswith(waiting) for line in s["waiting"]))
        run.complete(1)
        found = run.final_status()
        assert [(row["done"], row["num_samples"], row["reason"]) for row in found["evaluations"]] == [(True, 0, why)]
        assert (found["state"], found["stalled"], found["waiting"]) == ("finished", None, [])
        assert [row["reason"] for row in run.rows("broker") if "evaluation" in row] == [why]
        assert f"WARNING: evaluation of version 1 ended with 0 of 12 prompts: {why}" in run.processes[0].text()
        assert f"evaluation of version 1 ended early: {why}" in said("status", run.file)


def test_what_a_stopped_worker_has_begun_is_continued_by_another(tmp_path: Path, task: Path) -> None:
    # One version throughout: a worker that loads another one lets its engine go on afterwards, however it was paused.
    changes = {"rollout__num_rollout": 12, "data__prompt_data": [f"{task}/rl.jsonl@[0:1000]"], "weights__update_weights_interval": 12}
    with Run(tmp_path, task, engine__engine_api_key=ENGINE_KEY, rollout__drain_timeout_s=20.0, broker__lease_s=60, **changes) as run:
        *_, first = run.start_all()
        run.wait_for("a trained step", lambda s: s["step"] >= 1)
        words = first.engine().cmdline()
        url = f"http://127.0.0.1:{words[words.index('--port') + 1]}"

        def is_paused_in_the_middle() -> bool:
            run.assert_healthy("decoding")
            ask(url, "/pause_generation", {"mode": "in_place"})
            is_decoding = bool(ask(url, "/server_info")["internal_states"][0]["num_running_reqs"])
            if not is_decoding:
                ask(url, "/continue_generation", {})
            return is_decoding

        wait_until("pause while the engine decodes", is_paused_in_the_middle, 60)
        first.send(signal.SIGTERM)
        first.ends(0)
        left = run.wait_for("the partial", lambda s: s["counted"].get("partials kept"))
        assert left["groups"]["leased"] == 0
        run.start("rollout", name="w2")
        run.complete(12)
        final = run.final_status()
        assert final["counted"]["partials continued"] == final["counted"]["partials kept"]
        assert "returned: worker left" not in final["waste"]
