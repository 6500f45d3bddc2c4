"""Every `slimebus buffer` command beside a live run, then without a broker; and a run that goes on from a backup."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from live_run import Run, slow_hook
from slimebus_command import slimebus

from broker.inspect.reader import open_snapshot
from broker.state.records import Meta

pytestmark = pytest.mark.integration

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

        def buffer(*words: str, code: int = 0) -> str:
            done = slimebus("buffer", *words)
            assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
            assert "Traceback" not in done.stderr
            return done.stdout + done.stderr

        def listed(*words: str) -> list[dict[str, Any]]:
            return [json.loads(line) for line in buffer("ls", here, "--json", *words).splitlines()]

        here = str(run.file)
        flag.touch()
        broker, trainer, worker = run.start("broker"), run.start("trainer"), run.start("rollout", name="w1")
        run.wait_for("dead letters", lambda s: s["groups"]["dead"] >= 3)
        flag.unlink()
        run.wait_for("ready groups", lambda s: s["step"] >= 1 and s["groups"]["ready"] >= 2)

        # looked at
        dead = listed("--state", "dead")
        assert len(dead) >= 3
        assert all("the tool is down" in row["reason"] for row in dead)
        table = buffer("ls", here, "--state", "dead", "--limit", "2")
        assert dead[0]["group"] in table
        assert "dead" in table.splitlines()[-1]
        shown = buffer("show", here, dead[0]["group"])
        assert "prompt: " in shown
        assert "no samples" in shown
        committed = next(row for row in listed("--state", "ready", "--state", "committed") if row["num_samples"])
        whole = json.loads(buffer("show", here, "--json", committed["group"]))
        assert len(whole["samples"]) == 4
        assert len(whole["samples"][0]["tokens"]) == whole["samples"][0]["num_tokens"]
        assert "no group '0/99999x'" in buffer("show", here, "0/99999x", code=2)

        # exported
        assert buffer("verify", here).startswith("ok: ")
        out = tmp_path / "groups"
        buffer("export", here, "--out", str(out), "--state", "ready", "--state", "committed", "--state", "dead")
        rows = [json.loads(line) for line in (out / "groups.jsonl").read_text().splitlines()]
        assert {row["state"] for row in rows} >= {"dead", "committed"}
        buffer("export", here, "--out", str(tmp_path / "one"), committed["group"])

        # changed
        first, second, *_ = [row["group"] for row in dead]
        assert f"{first}: queued" in buffer("replay", here, first)
        assert f"{second}: dropped" in buffer("drop", here, second, "--why", "no longer wanted")
        assert any(word in buffer("drop", here, committed["group"]) for word in (": dropped", "has its samples"))
        run.wait_for("the replayed group", lambda s: s["moves"].get("dead>queued replayed") == 1)
        prompts = tmp_path / "more.jsonl"
        prompts.write_text('{"prompt": "1+1=", "label": "2"}\n{"prompt": "2+2=", "label": "4"}\n')
        assert "import/more.jsonl/1: queued" in buffer("import", here, str(prompts))
        assert "here already" in buffer("import", here, str(prompts))
        run.wait_for("imported prompts are sampled", lambda s: s["moves"].get("import>queued") == 2)
        assert "import/" in buffer("import", here, str(out), "--prompts-only")

        # without a broker
        for process in (broker, trainer, worker):
            process.kill()
        assert "a broker" not in buffer("verify", here)
        assert f"{second}: queued" in buffer("replay", here, second)
        assert {row["group"]: row["state"] for row in listed("--state", "queued")}[second] == "queued"
        run.start_all("w2")
        run.wait_for("the run goes on", lambda s: s["moves"].get("assigned>committed trained", 0) > 0 and 2 <= s["step"] < 400)


def test_a_backup_made_under_load_is_whole_and_the_run_goes_on_from_it(tmp_path: Path, task: Path) -> None:
    changes: dict[str, Any] = {"rollout__num_rollout": 20, "trainer__save_interval": 2, "broker__max_staleness": 2}
    with Run(tmp_path, task, rollout__custom_generate_function_path=slow_hook(tmp_path, 0.2), **changes) as run:
        processes, backup = run.start_all(), tmp_path / "backup"
        run.wait_for("two trained steps", lambda s: s["step"] >= 2)
        done = slimebus("buffer", "backup", str(run.file), "--out", str(backup))
        assert done.returncode == 0, done.stderr
        assert slimebus("buffer", "verify", "--run-dir", str(backup)).stdout.startswith("ok: ")
        with open_snapshot(backup) as snapshot:
            copied = msgspec.msgpack.decode(snapshot.records.get("meta", "meta") or b"", type=Meta).next_step
        run.wait_for("checkpoints of later steps", lambda s: s["oldest_checkpoint"] > copied)
        for process in processes:
            process.kill()
        shutil.rmtree(run.run_dir / "broker")
        shutil.copytree(backup / "broker", run.run_dir / "broker")
        broker, *_ = run.start_all("w2")
        run.complete()
        assert (run.final_status()["step"], run.final_status()["state"]) == (20, "finished")
        told = re.search(r"no record of (\d+) of the trained steps; up to (\d+) prompts may be trained twice", broker.text())
        assert told, broker.tail()
        assert int(told[2]) == 4 * int(told[1]) > 0
