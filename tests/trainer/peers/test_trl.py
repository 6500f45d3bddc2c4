"""Losses, gradients and advantages equal TRL's, where it has them. Needs .venv-trl beside bin/ (`bin/bench e2e` makes it), else skipped."""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mixed_batch import loss_and_gradient

from slimebus.config import RunConfig
from slimebus.config.schema import AlgorithmConfig, RolloutConfig
from trainer.batches.batch import Batch, Column
from trainer.objective.build_objective import build_objective
from trainer.objective.objective import Objective

ROOT = Path(__file__).resolve().parents[3]
PYTHON = ROOT / ".venv-trl" / "bin" / "python"
GROUP, LENGTHS, LONGEST = 3, [5, 2, 4, 1, 5, 3], 6

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-trl; `bin/bench e2e` makes it")

CLIP = {"eps_clip_high": 0.2}
LOSSES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # name: our algorithm, its config, TRL's settings
    "grpo per sequence": ("grpo", {"loss_aggregation": "sequence", "settings": CLIP}, {"loss_type": "grpo"}),
    "bnpo": ("grpo", {"settings": CLIP}, {"loss_type": "bnpo"}),
    "dapo": ("dapo", {}, {"loss_type": "dapo", "high": 0.28}),
    "dr_grpo": ("dr_grpo", {}, {"loss_type": "dr_grpo"}),
    "dual clip": ("grpo", {"settings": {**CLIP, "eps_clip_c": 1.5}}, {"loss_type": "bnpo", "delta": 1.5}),
    "gspo": (
        "gspo",
        {"settings": {"eps_clip": 3e-4, "eps_clip_high": 4e-4}},
        {"loss_type": "grpo", "level": "sequence", "low": 3e-4, "high": 4e-4},
    ),
    "gspo wide": (
        "gspo",
        {"settings": {"eps_clip": 0.2, "eps_clip_high": 0.3}},
        {"loss_type": "grpo", "level": "sequence", "low": 0.2, "high": 0.3},
    ),
    "cispo": ("cispo", {}, {"loss_type": "cispo", "high": 5.0}),
    "cispo low cap": ("cispo", {"settings": {"eps_clip_high": 0.1}}, {"loss_type": "cispo", "high": 1.1}),
    "k3 in the loss": ("grpo", {"settings": CLIP, "kl_loss_coef": 0.3, "kl_loss_type": "k3"}, {"loss_type": "bnpo", "beta": 0.3}),
    "unbiased KL": (
        "grpo",
        {"settings": CLIP, "kl_loss_coef": 0.3, "kl_loss_type": "unbiased"},
        {"loss_type": "bnpo", "beta": 0.3, "unbiased": True},
    ),
}
ADVANTAGES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "rloo": ("rloo", {}, {"trainer": "rloo"}),
    "rloo with KL": ("rloo", {"kl_coef": 0.2, "kl_loss_type": "k1"}, {"trainer": "rloo", "beta": 0.2}),
    "dr_grpo": ("dr_grpo", {}, {"trainer": "grpo", "scale": "none"}),
    "grpo": ("grpo", {}, {"trainer": "grpo", "scale": "group"}),
}


def objective(name: str, algorithm: dict[str, Any]) -> Objective:
    config = AlgorithmConfig(advantage_estimator=name, **algorithm)
    return build_objective(RunConfig(algorithm=config, rollout=RolloutConfig(rollout_max_response_len=LONGEST)))


@pytest.fixture(scope="module")
def numbers() -> dict[str, Any]:
    draw = np.random.default_rng(5)
    width = max(LENGTHS)
    old = -1 - draw.random((len(LENGTHS), width))
    return {
        "mask": [[int(t < length) for t in range(width)] for length in LENGTHS],
        "old": old.tolist(),
        "new": (old + 0.4 * draw.standard_normal(old.shape)).tolist(),
        "reference": (old + 0.4 * draw.standard_normal(old.shape)).tolist(),
        "advantages": [1.0, -1.0, 0.5, -0.25, 2.0, -2.0],
        "rewards": [1.0, 0.0, 0.25, 2.0, -1.0, 0.5],
        "group": GROUP,
        "longest": LONGEST,
    }


@pytest.fixture(scope="module")
def theirs(numbers: dict[str, Any]) -> Any:
    asked = {
        "numbers": numbers,
        "losses": {name: case for name, (_, _, case) in LOSSES.items()},
        "advantages": {name: case for name, (_, _, case) in ADVANTAGES.items()},
    }
    script = [str(PYTHON), str(Path(__file__).with_name("trl_losses.py"))]
    done = subprocess.run(script, input=json.dumps(asked), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def batch(numbers: dict[str, Any]) -> Batch:
    def flat(name: str, first: float) -> Column:
        rows = [np.concatenate([[first], row[:length]]) for row, length in zip(numbers[name], LENGTHS, strict=True)]
        return Column(np.concatenate(rows))

    ends = np.cumsum(np.array(LENGTHS) + 1)
    columns = {
        "tokens": Column(np.zeros(ends[-1], np.int32)),
        "loss_mask": Column(flat("mask", 0.0).values.astype(np.float32)),
        "rollout_logprobs": flat("old", 0.0),
        "reference_logprobs": flat("reference", 0.0),
        "new_logprobs": flat("new", -1.0),
        "reward": Column(np.array(numbers["rewards"]), "sample"),
        "temperature": Column(np.ones(len(ends), np.float32), "sample"),
        "trajectory": Column(np.arange(len(ends)) % GROUP, "sample"),
    }
    return Batch(ends, np.arange(len(ends)) // GROUP, columns)


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_are_trls(name: str, batch: Batch, numbers: dict[str, Any], theirs: Any) -> None:
    ours = objective(*LOSSES[name][:2])
    given = batch.with_columns({"advantages": Column(np.array(numbers["advantages"]), "sample")})
    given = given.with_columns(ours.advantages(given))
    loss, gradient = loss_and_gradient(ours, given.with_columns(ours.prepare(given)), given["new_logprobs"])
    want = theirs["losses"][name]
    at = batch["loss_mask"] > 0
    wanted = np.array(want["gradient"])[np.array(numbers["mask"]) > 0]
    print(f"{name}: loss {loss:.7f} TRL {want['loss']:.7f}, largest difference of a gradient {np.abs(gradient[at] - wanted).max():.1e}")
    assert loss == pytest.approx(want["loss"], rel=1e-5, abs=1e-6)
    assert gradient[at] == pytest.approx(wanted, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_are_trls(name: str, batch: Batch, theirs: Any) -> None:
    ours = objective(*ADVANTAGES[name][:2]).advantages(batch)["advantages"].values[batch.ends - 1]
    if name == "grpo":  # TRL's deviation is the sample's, ours the population's
        ours = ours * np.sqrt((GROUP - 1) / GROUP)
    wanted = np.array(theirs["advantages"][name])
    print(f"{name}: {ours.round(4).tolist()} TRL {wanted.round(4).tolist()}")
    assert ours == pytest.approx(wanted, rel=1e-4 if name == "grpo" else 1e-5)
