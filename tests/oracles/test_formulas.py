"""Losses, gradients, advantages, corrections and metrics equal verl's and TRL's on random batches: `bin/test --oracles`."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from mixed_batch import loss_and_gradient

from slimebus.config import RunConfig
from slimebus.config.schema import AlgorithmConfig, RolloutConfig
from trainer.batches.batch import Batch, Column
from trainer.critic.critic import value_loss
from trainer.objective.build_objective import build_objective
from trainer.objective.lag_metrics import metrics_by_lag
from trainer.objective.objective import Objective
from trainer.objective.returns import gae, token_rewards

HERE = Path(__file__).parent
WHEELS = HERE.parents[1] / ".venv-oracles"
CASES: dict[str, dict[str, list[Any]]] = msgspec.yaml.decode((HERE / "cases.yaml").read_bytes())
VERL_ALONE = {
    "returns": {"kind": "advantages", "estimator": "gae", "gamma": 0.9, "lambd": 0.8, "which": 1},
    "value loss": {"kind": "value loss", "clip": 0.1},
    "metrics": {"kind": "metrics"},
}
SEEDS, WIDTH, LONGEST = (0, 1, 2), 8, 9
SAME: Any = functools.partial(pytest.approx, rel=1e-6, abs=1e-6)
pytestmark = [
    pytest.mark.oracles,
    pytest.mark.skipif(not (WHEELS / "verl").is_dir(), reason="no .venv-oracles; `bin/test --oracles` gets the wheels of verl and TRL"),
]
Numbers = dict[str, Any]


def deviation(numbers: Numbers, floor: float) -> np.ndarray:
    """[S, 1]: the population's deviation of a group + 1e-4, as it is here, by that of the sample + floor."""
    rewards, groups = np.array(numbers["rewards"]), np.array(numbers["groups"])
    of_samples = [rewards[groups == group] for group in groups]
    return np.array([[(r.std() + 1e-4) / (r.std(ddof=1) + floor)] for r in of_samples])


def bessel(numbers: Numbers) -> float:
    """Tokens are whitened by the population's deviation here."""
    count = np.sum(numbers["mask"])
    return float(np.sqrt((count - 1) / count))


FACTORS: dict[str, Any] = {
    "deviation 1e-6": functools.partial(deviation, floor=1e-6),
    "deviation 1e-4": functools.partial(deviation, floor=1e-4),
    "bessel": bessel,
}


def numbers_of(seed: int, sizes: list[int], *, is_ragged: bool) -> Numbers:
    """Random numbers of groups of these sizes, exact in float32. is_ragged: tokens are masked anywhere, and all of one sample."""
    draw, count = np.random.default_rng(seed), sum(sizes)
    mask = (np.arange(WIDTH) < draw.integers(1, WIDTH + 1, (count, 1))) & ((draw.random((count, WIDTH)) < 0.8) | (not is_ragged))
    mask[0] |= not is_ragged  # TRL pads to the longest
    mask[2] &= not is_ragged
    old, groups = -1 - draw.random(mask.shape), np.repeat(np.arange(len(sizes)), sizes)
    rewards = np.where(groups == len(sizes) - 1, 0.5, draw.standard_normal(count))
    logprobs = {name: old + 0.3 * draw.standard_normal(mask.shape) for name in ("rollout", "new", "reference")}
    others = {name: draw.standard_normal(mask.shape) for name in ("values", "returns")}
    made = {"mask": mask, "old": old, "rewards": rewards, "advantages": draw.standard_normal(count), **logprobs, **others}
    return {"groups": groups.tolist(), **{name: values.astype(np.float32).astype(float).tolist() for name, values in made.items()}}


NUMBERS = {
    "verl": [numbers_of(seed, [3, 4, 2, 3], is_ragged=True) for seed in SEEDS],  # of a group of one its A is the reward
    "trl": [numbers_of(seed, [3, 3, 3], is_ragged=False) for seed in SEEDS],  # groups of one size
}


@pytest.fixture(scope="module")
def answers() -> dict[str, list[dict[str, Any]]]:
    """Theirs by library, seed and `KIND NAME`."""
    found = {}
    for library, numbers in NUMBERS.items():
        kinds = {kind: CASES[f"{library} {kind}"] for kind in ("loss", "advantages")}
        cases = {f"{kind} {name}": {"kind": kind, **case[1]} for kind, named in kinds.items() for name, case in named.items()}
        asked = {"numbers": numbers, "cases": cases | (VERL_ALONE if library == "verl" else {}), "longest": LONGEST}
        command, environment = [sys.executable, str(HERE / f"{library}_formulas.py")], os.environ | {"PYTHONPATH": str(WHEELS)}
        done = subprocess.run(command, input=json.dumps(asked), env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        found[library] = json.loads(done.stdout)
    return found


def batch_of(numbers: Numbers) -> Batch:
    """Each sample behind one token of prompt; what is masked is NaN but for new_logprobs, which are computed."""
    mask = np.array(numbers["mask"]) > 0

    def flat(values: np.ndarray, first: float = 0.0) -> Column:
        return Column(np.pad(values, ((0, 0), (1, 0)), constant_values=first).astype(np.float32).reshape(-1))

    names = {"old": "old_logprobs", "rollout": "rollout_logprobs", "reference": "reference_logprobs", "values": "values"}
    columns = {there: flat(np.where(mask, numbers[name], np.nan)) for name, there in names.items()}
    columns |= {"loss_mask": flat(mask), "new_logprobs": flat(np.array(numbers["new"]), -1.0)}
    columns |= {name: Column(np.zeros(mask.size + len(mask), np.int64)) for name in ("tokens", "versions", "lag")}
    columns |= {"reward": Column(np.array(numbers["rewards"]), "sample"), "trajectory": Column(np.arange(len(mask)), "sample")}
    columns["temperature"] = Column(np.ones(len(mask), np.float32), "sample")
    return Batch(np.arange(1, len(mask) + 1) * (WIDTH + 1), np.array(numbers["groups"]), columns)


def of_tokens(flat: np.ndarray, numbers: Numbers) -> np.ndarray:
    """What a column of the batch has at the trained tokens."""
    return flat.reshape(-1, WIDTH + 1)[:, 1:][np.array(numbers["mask"]) > 0]


def objective_of(ours: dict[str, Any], library: str) -> Objective:
    named = {name: value for name, value in ours.items() if name in AlgorithmConfig.__struct_fields__}
    settings = {name: value for name, value in ours.items() if name not in named}
    algorithm = AlgorithmConfig(**{"use_rollout_logprobs": library == "trl", **named}, settings=settings)
    return build_objective(RunConfig(algorithm=algorithm, rollout=RolloutConfig(rollout_max_response_len=LONGEST, num_steps_per_rollout=2)))


def cases(kind: str) -> Any:
    found = [(library, name) for library in NUMBERS for name in CASES[f"{library} {kind}"]]
    return pytest.mark.parametrize(("library", "name"), found, ids=[" ".join(case) for case in found])


@pytest.mark.parametrize("seed", SEEDS)
@cases("loss")
def test_loss_and_gradient_are_theirs(library: str, name: str, seed: int, answers: Any) -> None:
    numbers, theirs = NUMBERS[library][seed], answers[library][seed][f"loss {name}"]
    objective, batch = objective_of(CASES[f"{library} loss"][name][0], library), batch_of(numbers)
    batch = batch.with_columns({"advantages": Column(np.array(numbers["advantages"]), "sample")})
    batch = batch.with_columns(objective.advantages(batch))
    loss, gradient = loss_and_gradient(objective, batch.with_columns(objective.prepare(batch)), batch["new_logprobs"])
    assert of_tokens(gradient, numbers) == SAME(np.array(theirs["gradient"])[np.array(numbers["mask"]) > 0])
    assert loss == SAME(theirs["loss"]) or name == "vespo"


@pytest.mark.parametrize("seed", SEEDS)
@cases("advantages")
def test_advantages_are_theirs(library: str, name: str, seed: int, answers: Any) -> None:
    numbers, (ours, _, *factor) = NUMBERS[library][seed], CASES[f"{library} advantages"][name]
    made = objective_of(ours, library).advantages(batch_of(numbers))["advantages"].values
    mask = np.array(numbers["mask"]) > 0
    theirs = np.broadcast_to(np.array(answers[library][seed][f"advantages {name}"]).reshape(len(mask), -1), mask.shape)
    factors = np.broadcast_to(FACTORS[factor[0]](numbers) if factor else 1.0, mask.shape)
    assert of_tokens(made, numbers) * factors[mask] == SAME(theirs[mask])


@pytest.mark.parametrize("seed", SEEDS)
def test_the_critics_returns_and_loss_are_verls(seed: int, answers: Any) -> None:
    numbers, theirs, batch = NUMBERS["verl"][seed], answers["verl"][seed], batch_of(NUMBERS["verl"][seed])
    mask = np.array(numbers["mask"]) > 0
    returns = gae(batch, token_rewards(batch, AlgorithmConfig()), batch["values"], gamma=0.9, lambd=0.8)[1]
    assert of_tokens(returns, numbers) == SAME(np.array(theirs["returns"])[mask])
    new, before, wanted = (torch.tensor(numbers[name], dtype=torch.float64)[mask] for name in ("new", "old", "returns"))
    loss = value_loss(new.requires_grad_(), before, wanted, 0.1)[0].mean()
    loss.backward()
    assert loss.item() == SAME(theirs["value loss"]["loss"])
    assert new.grad is not None
    assert new.grad.numpy() == SAME(np.array(theirs["value loss"]["gradient"])[mask])


@pytest.mark.parametrize("seed", SEEDS)
def test_how_far_the_policy_is_from_the_sampler_is_verls(seed: int, answers: Any) -> None:
    metrics, theirs = metrics_by_lag(batch_of(NUMBERS["verl"][seed]), None, None), answers["verl"][seed]["metrics"]
    assert {name: metrics[f"lag/all/{name}"] for name in theirs} == SAME(theirs)
