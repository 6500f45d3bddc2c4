"""Commands beside a run: evaluate it while it trains, look at it, export what it made."""

import json
import re
import sys
from pathlib import Path

import pytest
from live_run import Run, slow_hook

pytestmark = pytest.mark.integration


def replay(run: Run, groups: Path) -> dict[int, dict[str, float]]:
    """Export the groups that were trained, and train on them alone: the metrics of each step."""
    slimebus = [sys.executable, "-m", "slimebus"]
    exported = run.command("export", [*slimebus, "buffer", "export", str(run.file), "--state", "committed", "--out", str(groups)])
    assert exported.wait(60) == 0, exported.tail()
    done = run.command("replay", [*slimebus, "trainer", str(run.file), "--replay", str(groups)])
    assert done.wait(60) == 0, done.tail()
    assert re.search(r"replayed to step 5; BLAKE3 of the weights: \w{64}", done.text()), done.tail()
    return {row["step"]: row for row in map(json.loads, (run.run_dir / "replay" / "trainer.jsonl").read_text().splitlines())}


def test_a_run_is_evaluated_on_request_shown_and_exported(tmp_path: Path, task: Path) -> None:
    sets = {"held": {"path": f"{task}/heldout.jsonl@[0:12]", "max_response_len": 8}}
    hook = slow_hook(tmp_path, 0.3)
    with Run(tmp_path, task, rollout__custom_generate_function_path=hook, eval__datasets=sets, eval__skip_eval_before_train=True) as run:
        run.start_all()
        run.wait_for("a trained step", lambda s: s["step"] >= 1)
        evaluated = run.command("eval", [sys.executable, "-m", "slimebus", "eval", "--broker", run.address])
        shown = run.command("status", [sys.executable, "-m", "slimebus", "status", "--broker", run.address])
        assert shown.wait(30) == 0, shown.tail()
        assert "w1" in shown.text()
        assert evaluated.wait(60) == 0, evaluated.tail()
        assert re.search(r"held +\d+ +\d\.\d+ \[.*\] +\d\.\d+ \[.*\] +12 +0", evaluated.text())
        run.complete()
        traced = run.command("trace", [sys.executable, "-m", "slimebus", "trace", str(run.run_dir), "--out", str(tmp_path / "t.json")])
        assert traced.wait(60) == 0, traced.tail()
        out = tmp_path / "exported"
        exported = run.command("export", [sys.executable, "-m", "slimebus", "export", str(run.file), "--out", str(out)])
        assert exported.wait(60) == 0, exported.tail()
        assert "step 6 written to" in exported.text()
        assert exported.text().index("loading megatron-core") < exported.text().index("reading the newest checkpoint")
        for words, said in ((["--step", "4"], "exists and is not empty"), (["--step", "5", "--force"], "it has those of steps 4, 6")):
            refused = run.command("export", [sys.executable, "-m", "slimebus", "export", str(run.file), "--out", str(out), *words])
            refused.expected.add(2)
            assert refused.wait(60) == 2, refused.tail()
            assert said in refused.text()
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
