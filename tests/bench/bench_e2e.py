"""The quick start against itself on-policy and against TRL's GRPOTrainer: `bin/bench e2e`. Wants an otherwise idle machine.

One warm model and one set of problems serve all three. Times to 0.90 are from the start of training to the moment when the
weights that reach it were published, interpolated between evaluations, which come after the same numbers of trained samples on
both sides. Rows against TRL are medians over the seeds; `spread` rows have the smallest and the largest ratio of a seed.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trl_baseline
from bench_process import measured
from bench_row import Row, row
from slimebus_command import ROOT

from slimebus.view import report

sys.path.insert(0, str(ROOT / "configs" / "quickstart"))

STEPS, QUICK_STEPS = 120, 30
TRL_STEPS, QUICK_TRL_STEPS = 40, 10
SEEDS = (0, 1, 2)


def rows(quick: bool) -> list[Row]:
    """All measurements. quick: fewer steps of each run, for a look."""
    import quickstart

    steps = QUICK_STEPS if quick else STEPS
    with tempfile.TemporaryDirectory(prefix="slimebus-bench-") as scratch:
        run_dir = Path(scratch)
        quickstart.prepare(run_dir, seed=0, resume=False)
        warm = quickstart.warm_up(run_dir, 0, None)
        ahead, on_policy = (_learn(run_dir, warm, eta, steps) for eta in (2, 0))
        beside = QUICK_TRL_STEPS if quick else TRL_STEPS
        pairs = [
            (_learn(run_dir, warm, 2, beside, seed), _trl(warm, run_dir / "task", beside, seed)) for seed in (SEEDS[:1] if quick else SEEDS)
        ]
    return [*_async_rows(ahead, on_policy), *_trl_rows(pairs), *_share_rows(ahead)]


def _learn(run_dir: Path, warm: Path, eta: int, steps: int, seed: int = 0) -> report.RunReport:
    import quickstart

    folder = run_dir / f"eta-{eta}-{steps}-{seed}"
    changes = {"seed": seed, "model.hf_checkpoint": warm, "broker.max_staleness": eta, "rollout.num_rollout": steps}
    changes["optimizer.lr_decay_iters"] = STEPS
    quickstart.run_stage(f"GRPO eta {eta} seed {seed}", quickstart.write_run("run.yaml", folder, run_dir, changes))
    return report.read_report(folder)


def _trl(warm: Path, data: Path, steps: int, seed: int) -> dict[str, Any]:
    return measured("trl_baseline.py", json.dumps({"model": str(warm), "data": str(data), "steps": steps, "seed": seed}))


def time_to_goal(found: report.RunReport) -> float | None:
    """Seconds of training until held-out accuracy reached 0.90; None if it never did."""
    start = found.steps[0]["time"] - found.steps[0]["elapsed_s"]
    times = [0.0, *(r["time"] - start for r in found.steps)]
    curve = [(r["version"], times[min(r["version"], len(times) - 1)], r["mean_reward"]) for r in found.evaluations("heldout")]
    return trl_baseline.time_to_goal(curve)


def samples_per_s(found: report.RunReport) -> float:
    """Samples trained a second once warm, evaluations and checkpoints included."""
    first, last = found.steps[report.WARM_STEPS], found.steps[-1]
    return float(sum(r["num_samples"] for r in found.steps[report.WARM_STEPS + 1 :]) / (last["time"] - first["time"]))


def _async_rows(ahead: report.RunReport, on_policy: report.RunReport) -> list[Row]:
    fast, slow = time_to_goal(ahead), time_to_goal(on_policy)
    found = [row("async_samples_gain", samples_per_s(ahead), "samples/s", samples_per_s(on_policy), "")]
    if fast is not None and slow is not None:
        found.insert(0, row("async_gain", fast, "s to 0.90", slow, ">= 1.3", ratio=slow / fast))
    return found


def _trl_rows(pairs: Sequence[tuple[report.RunReport, dict[str, Any]]]) -> list[Row]:
    """Ours and TRL's of each seed."""
    speeds = [(samples_per_s(ours), trl["samples_per_s"]) for ours, trl in pairs]
    found = _median_rows("vs_trl", "samples/s", [(*speed, speed[0] / speed[1]) for speed in speeds], ">= 1.6")
    times = [(time_to_goal(ours), trl["time_to_090_s"]) for ours, trl in pairs]
    if all(ours and theirs for ours, theirs in times):
        found += _median_rows("vs_trl_time_to_090", "s to 0.90", [(ours, theirs, theirs / ours) for ours, theirs in times], "")
    return found


def _median_rows(name: str, unit: str, seeds: Sequence[tuple[Any, Any, float]], goal: str) -> list[Row]:
    """The seed of the median ratio, and the smallest and the largest ratio."""
    ours, theirs, ratio = sorted(seeds, key=lambda seed: seed[2])[len(seeds) // 2]
    ratios = [seed[2] for seed in seeds]
    spread = row(f"{name}_spread", min(ratios), "least, most of a seed", max(ratios), "")
    return [row(name, ours, unit, theirs, goal, ratio=ratio), spread]


def _share_rows(ahead: report.RunReport) -> list[Row]:
    made = report.summarise(ahead)
    idle = {"trainer_idle": made["trainer_idle"], "worker_idle": made["worker_idle"]}
    bottleneck = min(idle, key=lambda name: idle[name])
    found = [row("delta_size", made["delta_fraction"], "of the model", 1.0, "<= 0.15")]
    return found + [row(name, share, "of its time", 1.0, "<= 0.1" if name == bottleneck else "") for name, share in idle.items()]
