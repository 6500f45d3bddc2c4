"""Commands beside a run: it is looked at, evaluated, exported; settings, buffer, workers and engines are changed."""

import json
import os
import re
import shutil
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from live_run import Run, clients
from slimebus_command import said

from broker.inspect.reader import open_snapshot
from broker.state.records import Meta
from rollout.engines.backends import embedded_engine
from rollout.engines.sglang.process import EngineProcess

pytestmark = pytest.mark.integration


def replay(run: Run, groups: Path) -> dict[int, dict[str, float]]:
    """Export the groups that were trained, and train on them alone: the metrics of each step."""
    said("buffer", "export", run.file, "--state", "committed", "--out", groups)
    done = said("trainer", run.file, "--replay", groups)
    assert re.search(r"replayed to step 5; BLAKE3 of the weights: \w{64}", done), done
    return {row["step"]: row for row in map(json.loads, (run.run_dir / "replay" / "trainer.jsonl").read_text().splitlines())}


def test_a_run_is_evaluated_on_request_shown_and_exported(tmp_path: Path, task: Path) -> None:
    sets = {"held": {"path": f"{task}/heldout.jsonl@[0:12]", "max_response_len": 8}}
    with Run(tmp_path, task, slow_s=0.3, eval__datasets=sets, eval__skip_eval_before_train=True) as run:
        run.start_all()
        run.wait_for("a trained step", lambda s: s["step"] >= 1)
        assert "w1" in said("status", "--broker", run.address)
        assert re.search(r"held +\d+ +\d\.\d+ \[.*\] +\d\.\d+ \[.*\] +12 +0", said("eval", "--broker", run.address))
        run.complete(6)
        said("trace", run.run_dir, "--out", tmp_path / "t.json")
        out = tmp_path / "exported"
        exported = said("export", run.file, "--out", out)
        assert "step 6 written to" in exported
        assert exported.index("loading megatron-core") < exported.index("reading the newest checkpoint")
        for words, why in ((["--step", "4"], "exists and is not empty"), (["--step", "5", "--force"], "it has those of steps 4, 6")):
            assert why in said("export", run.file, "--out", out, *words, code=2)
        steps, trained = replay(run, tmp_path / "groups"), {row["step"]: row for row in run.rows("trainer")}
        assert list(steps) == [4, 5], "the broker keeps their samples"
        for step, row in steps.items():
            for name in ("loss", "grad_norm", "entropy", "reward", "lag_max"):
                assert row[name] == pytest.approx(trained[step][name], abs=1e-6), (step, name)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    of_trainer = {"wait", "train", "publish", "wait for publisher", "copy", "encode", "announce", "save", "commit"}
    assert {e["name"] for e in events if e["ph"] == "X"} >= of_trainer | {"pull", "share", "load", "sample"}
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(str(out)).config.vocab_size == 38


def change(run: Run, *words: str) -> dict[str, Any]:
    """What `slimebus set WORDS --json` prints."""
    answer: dict[str, Any] = json.loads(said("set", run.file, *words, "--json"))
    return answer


def test_bound_batch_group_size_and_pace_change_in_a_live_run(tmp_path: Path, task: Path) -> None:
    # 4 groups of 4 samples in 2 optimizer steps, then 5 groups of 2 samples on-policy, then a version every second step
    with Run(
        tmp_path, task, broker__max_staleness=3, rollout__num_rollout=30, rollout__num_steps_per_rollout=2, trainer__save_interval=7
    ) as run:
        run.start_all()
        run.wait_for("three steps", lambda s: s["step"] >= 3)
        lower = change(run, "max-staleness", "0", "rollout-batch-size", "5", "n-samples-per-prompt", "2")
        assert lower["changed"] == {"max_staleness": [3, 0], "rollout_batch_size": [4, 5], "n_samples_per_prompt": [4, 2]}
        first = lower["step"]
        run.wait_for("on-policy steps", lambda s: s["step"] >= first + 4)
        second = change(run, "max-staleness=1", "weights.update_weights_interval=2")["step"]
        status = run.wait_for("steps at half the pace", lambda s: s["step"] >= second + 4)
        assert [c["step"] for c in status["changes"]] == [first, second]
        run.complete(30, batch_size=0, timeout_s=240)

        rows = run.trained()
        assert [len(rows[step]["groups"]) for step in rows] == [4] * first + [5] * (30 - first)
        bounds = [3 if step < first else 0 if step < second else 1 for step in range(30)]
        worst = [max(map(int, rows[step]["lag_tokens"])) for step in range(30)]
        assert all(lag <= bound for lag, bound in zip(worst, bounds, strict=True)), list(zip(worst, bounds, strict=True))
        assert set(worst[first:second]) == {0}
        versions = [rows[step]["version"] for step in range(30)]
        assert versions[: second + 1] == list(range(second + 1)), "one version a step until then"
        assert versions[-1] - versions[second] in ((29 - second) // 2, (30 - second) // 2)
        steps = {row["step"]: row for row in run.rows("trainer")}
        assert steps[29]["num_samples"] == 10
        saved = json.loads((run.run_dir / "checkpoints" / "step_00000030" / "state.json").read_text())
        assert saved["progress"]["version"] == run.final_status()["version"]


def workers(status: dict[str, Any]) -> set[str]:
    return {client["name"] for client in clients(status, "rollout") if client["state"] == "serving"}


def test_two_workers_of_up_grow_to_six_and_shrink_to_one_while_steps_go_on(tmp_path: Path, task: Path) -> None:
    with Run(tmp_path, task, rollout__num_rollout=100_000, broker__max_staleness=4, trainer__save_interval=1000) as run:
        run.start("up", "--workers", "2")
        run.wait_for("two workers", lambda s: len(workers(s)) == 2 and s["step"] >= 1)
        for number in range(3, 7):
            run.start("rollout", name=f"more-{number}")
        grown = run.wait_for("six workers", lambda s: len(workers(s)) == 6)
        run.wait_for("steps with six", lambda s: s["step"] >= grown["step"] + 2)
        for name in ("worker-2", "more-3", "more-4", "more-5", "more-6"):
            assert f"{name}: it has left" in said("drain", name, "--broker", run.address)
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

        def engine_command(*words: str) -> str:
            return said("engines", *words, "--broker", run.address)

        def engines() -> dict[str, Any]:
            return {engine["url"]: engine for engine in json.loads(engine_command("ls", "--json"))}

        assert "slimebus" in engine_command("attach", second.url)
        run.wait_for("the second to serve", lambda s: [e["state"] for e in clients(s, "rollout")[0]["engines"]] == ["serving"] * 2)
        assert engines()[second.url]["is_owned"] is False
        server = psutil.Process(first.pid).children()[0].pid
        os.kill(server, signal.SIGSTOP)
        begun, at = time.monotonic(), run.status()["step"]
        run.wait_for("steps beside an engine that hangs", lambda s: s["step"] >= at + 3)
        assert time.monotonic() - begun < 40
        os.kill(server, signal.SIGCONT)
        run.wait_for("both again", lambda s: [e["state"] for e in clients(s, "rollout")[0]["engines"]] == ["serving"] * 2)
        assert engine_command("detach", first.url).strip() == f"w: {first.url} is detached"
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


HOOK = """
import asyncio, itertools, os

calls = itertools.count()

async def generate(session):
    if os.path.exists({flag!r}) and next(calls) < 32:  # 4 samples a group: 8 groups fail; 16 in a row would end the worker
        raise ValueError("the tool is down")
    await asyncio.sleep(0.3)
    await session.generate()
"""


def test_a_live_run_is_listed_shown_exported_and_changed_with_and_without_a_broker(tmp_path: Path, task: Path) -> None:
    flag = tmp_path / "down"
    (tmp_path / "flaky.py").write_text(HOOK.format(flag=str(flag)))
    changes: dict[str, Any] = {"rollout__num_rollout": 500, "broker__max_attempts": 1, "broker__max_staleness": 3}
    changes["trainer"] = {"save_interval": 10_000, "tensorboard": False}  # nothing is freed, the trainer begins again at step 0
    with Run(tmp_path, task, rollout__custom_generate_function_path="flaky.py:generate", **changes) as run:

        def buffer(command: str, *words: object, code: int = 0) -> str:
            return said("buffer", command, run.file, *words, code=code)

        def listed(*words: str) -> list[dict[str, Any]]:
            return [json.loads(line) for line in buffer("ls", "--json", *words).splitlines()]

        flag.touch()
        broker, trainer, worker = run.start("broker"), run.start("trainer"), run.start("rollout", name="w1")
        run.wait_for("dead letters", lambda s: s["groups"]["dead"] >= 3)
        flag.unlink()
        run.wait_for("ready groups", lambda s: s["step"] >= 1 and s["groups"]["ready"] >= 2)

        # looked at
        dead = listed("--state", "dead")
        assert len(dead) >= 3
        assert all("the tool is down" in row["reason"] for row in dead)
        table = buffer("ls", "--state", "dead", "--limit", "2")
        assert dead[0]["group"] in table
        assert "dead" in table.splitlines()[-1]
        shown = buffer("show", dead[0]["group"])
        assert "prompt: " in shown
        assert "no samples" in shown
        committed = next(row for row in listed("--state", "ready", "--state", "committed") if row["num_samples"])
        whole = json.loads(buffer("show", "--json", committed["group"]))
        assert len(whole["samples"]) == 4
        assert len(whole["samples"][0]["tokens"]) == whole["samples"][0]["num_tokens"]
        assert "no group '0/99999x'" in buffer("show", "0/99999x", code=2)

        # exported
        assert buffer("verify").startswith("ok: ")
        out = tmp_path / "groups"
        buffer("export", "--out", out, "--state", "ready", "--state", "committed", "--state", "dead")
        rows = [json.loads(line) for line in (out / "groups.jsonl").read_text().splitlines()]
        assert {row["state"] for row in rows} >= {"dead", "committed"}
        buffer("export", "--out", tmp_path / "one", committed["group"])

        # changed
        first, second, *_ = [row["group"] for row in dead]
        assert f"{first}: queued" in buffer("replay", first)
        assert f"{second}: dropped" in buffer("drop", second, "--why", "no longer wanted")
        assert any(word in buffer("drop", committed["group"]) for word in (": dropped", "has its samples"))
        run.wait_for("the replayed group", lambda s: s["moves"].get("dead>queued replayed") == 1)
        prompts = tmp_path / "more.jsonl"
        prompts.write_text('{"prompt": "1+1=", "label": "2"}\n{"prompt": "2+2=", "label": "4"}\n')
        assert "import/more.jsonl/1: queued" in buffer("import", prompts)
        assert "here already" in buffer("import", prompts)
        run.wait_for("imported prompts are sampled", lambda s: s["moves"].get("import>queued") == 2)
        assert "import/" in buffer("import", out, "--prompts-only")

        # without a broker
        for process in (broker, trainer, worker):
            process.kill()
        assert "a broker" not in buffer("verify")
        assert f"{second}: queued" in buffer("replay", second)
        assert {row["group"]: row["state"] for row in listed("--state", "queued")}[second] == "queued"
        run.start_all("w2")
        run.wait_for("the run goes on", lambda s: s["moves"].get("assigned>committed trained", 0) > 0 and 2 <= s["step"] < 400)


def test_a_backup_made_under_load_is_whole_and_the_run_goes_on_from_it(tmp_path: Path, task: Path) -> None:
    with Run(tmp_path, task, slow_s=0.2, rollout__num_rollout=20, broker__max_staleness=2) as run:
        processes, backup = run.start_all(), tmp_path / "backup"
        run.wait_for("two trained steps", lambda s: s["step"] >= 2)
        said("buffer", "backup", run.file, "--out", backup)
        assert said("buffer", "verify", "--run-dir", backup).startswith("ok: ")
        with open_snapshot(backup) as snapshot:
            copied = msgspec.msgpack.decode(snapshot.records.get("meta", "meta") or b"", type=Meta).next_step
        run.wait_for("checkpoints of later steps", lambda s: s["oldest_checkpoint"] > copied)
        for process in processes:
            process.kill()
        shutil.rmtree(run.run_dir / "broker")
        shutil.copytree(backup / "broker", run.run_dir / "broker")
        restored = run.start_all("w2")
        assert [process.wait() for process in restored] == [0, 0, 0]
        assert (run.final_status()["step"], run.final_status()["state"]) == (20, "finished")
        told = re.search(r"no record of (\d+) of the trained steps; up to (\d+) prompts may be trained twice", restored[0].text())
        assert told, restored[0].tail()
        assert int(told[2]) == 4 * int(told[1]) > 0
