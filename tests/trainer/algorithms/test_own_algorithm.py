"""An algorithm of one's own: one file beside the run.yaml, and nothing else is touched."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loss_rows import batch_of, row_of

from slimebus.bus.errors import ConfigError, HookError
from slimebus.config import RunConfig, resolve
from slimebus.config.schema import AlgorithmConfig, TrainerConfig
from trainer.batches.batch import Batch, Column
from trainer.model.policy import Policy
from trainer.objective.build_objective import algorithm_problems
from trainer.objective.group_rewards import rewards_with_kl
from trainer.objective.objective import Objective
from trainer.objective.plugin import PolicyGradient, TokenLoss
from trainer.objective.problems import objective_problems

FILE = '''
import numpy as np

from trainer.objective.group_rewards import per_group
from trainer.objective.plugin import PolicyGradient, TokenLoss


class Ranked(PolicyGradient):
    """Vanilla policy gradient on the rank of a reward in its group, with a bonus field and the mean ratio of the sequence."""

    aggregation = "sequence"

    class Settings(PolicyGradient.Settings, frozen=True):
        """Its own."""

        rank_scale: float = 1.0
        """[ratio] Of the advantages."""

    settings: Settings

    def needs(self):
        return {"bonus", "current_logprobs"}

    def problems(self):
        yield from super().problems()
        if self.settings.rank_scale <= 0:
            yield f"algorithm.settings.rank_scale: {self.settings.rank_scale:g}; expected above 0"

    def advantages(self, batch):
        def ranks(rewards, shares):
            return self.settings.rank_scale * (rewards.argsort().argsort() - (len(rewards) - 1) / 2)

        return per_group(batch, batch["reward"], ranks) + batch.per_token("bonus")

    def prepare(self, part):
        return {"drift": np.abs(part["current_logprobs"] - part["rollout_logprobs"])}

    def learning_rate_factor(self, part):
        return 0.5

    def loss(self, row):
        s = row.sequence_mean(row.new_logprobs - row.old_logprobs).exp()
        return TokenLoss(-s * row.advantages, {"drift": row["drift"], "sequence_ratio": s.detach()})
'''


def config_of(folder: Path, **settings: Any) -> Any:
    (folder / "ranked.py").write_text(FILE)
    lines = ["optimizer: {lr: 0.01}", "algorithm:", "  advantage_estimator: ranked.py:Ranked", f"  settings: {settings}"]
    (folder / "run.yaml").write_text("\n".join(lines))
    return resolve(folder / "run.yaml", environ={})


def with_bonus(groups: list[Any]) -> list[Any]:
    for group in groups:
        for sample in group.samples:
            sample.extras = {"bonus": np.array([0.25], np.float32)}
    return groups


def test_an_algorithm_in_one_file_is_checked_and_trains(tmp_path: Path, tied_model: Path, make_batch: Any, closing: Any) -> None:
    assert algorithm_problems(config_of(tmp_path, rank_scale=-1)) == ["algorithm.settings.rank_scale: -1; expected above 0"]
    (unknown,) = algorithm_problems(config_of(tmp_path, rank_scal=2))
    assert unknown.endswith("run.yaml:4: algorithm.settings.rank_scal: no setting of ranked; did you mean 'rank_scale'?")
    resolved = config_of(tmp_path, rank_scale=2)
    policy = closing(Policy.build(resolved.config, str(tied_model), resolved.base))
    assert policy.objective.fields == {"bonus"}
    metrics = [policy.train(with_bonus(make_batch()), num_steps=2) for _ in range(3)]
    assert [step["updated"] for step in metrics] == [2, 2, 2]
    assert [step["lr"] for step in metrics] == pytest.approx([0.005] * 3)
    assert metrics[0]["drift"] == pytest.approx(metrics[0]["logprob_mismatch_mean"], rel=1e-3)  # current: of before each optimizer step
    assert metrics[2]["loss"] < metrics[0]["loss"]


def test_the_algorithm_of_the_document_trains(tmp_path: Path, tied_model: Path, make_batch: Any, closing: Any) -> None:
    page = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text()
    (source,) = re.findall(r"```python\n([^`]*?class Brief.*?)```", page, re.DOTALL)
    (tmp_path / "brief.py").write_text(source)
    flags = {"algorithm.advantage_estimator": "brief.py:Brief", "algorithm.settings.token_price": 0.01, "algorithm.settings.eps_clip": 0.1}
    config, batch = resolve(None, flags, environ={}).config, make_batch()
    policy = closing(Policy.build(config, str(tied_model), tmp_path))
    assert policy.train(batch)["updated"] == 1
    advantages = policy.objective.advantages(policy.objective.batch_of(batch, None))["advantages"].values
    first = batch[0].samples
    rewards = np.array([s.reward - 0.01 * s.loss_mask.sum() for s in first])
    assert advantages[len(first[0].tokens) - 1] == pytest.approx(rewards[0] - rewards.mean(), rel=1e-5)


def test_the_correction_of_the_document_trains(tmp_path: Path, tied_model: Path, make_batch: Any, closing: Any) -> None:
    page = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text()
    (source,) = re.findall(r"```python\n([^`]*?class SoftCap.*?)```", page, re.DOTALL)
    (tmp_path / "soft.py").write_text(source)
    flags = {"algorithm.corrections": "soft.py:SoftCap", "algorithm.settings.soft_cap": 1e-9}
    policy = closing(Policy.build(resolve(None, flags, environ={}).config, str(tied_model), tmp_path))
    metrics = policy.train(make_batch())
    assert metrics["soft_capped"] == 1.0
    assert metrics["loss"] == pytest.approx(0.0, abs=1e-6)


IMPORTS = """
import itertools

import torch

from trainer.algorithms.grpo import Grpo
from trainer.objective.plugin import Correction, TokenLoss, TokenWeight


class Odd({base}):
    is_importance_weight = False

    {method}
"""
LOSS = "def loss(self, row, turn=itertools.count()): return TokenLoss"
ODD = {
    'def advantages(self, batch): batch["reward"][:] = 0': "assignment destination is read-only; the columns of a batch are those of all",
    'def prepare(self, part): part["loss_weight"] *= 2': "output array is read-only; the columns of a batch",
    'def learning_rate_factor(self, part): return float("nan")': "learning_rate_factor is nan; expected a finite number, 0 or above",
    'def learning_rate_factor(self, part): return float("inf")': "learning_rate_factor is inf; expected",
    "def learning_rate_factor(self, part): return -1": r"learning_rate_factor is -1\.0; expected",
    'def prepare(self, part): return {name: part[name] * 0 for name in ("tokens", "loss_mask")}': "columns loss_mask, tokens, which are",
    'def prepare(self, part): return {"old_logprobs": part["rollout_logprobs"]}': "prepare gave the columns old_logprobs, which are there",
    f'{LOSS}(-row.new_logprobs, {{"loss": row.advantages, "lag/all/m2": row.advantages}})': "it gave the measures lag/all/m2, loss, ",
    f"{LOSS}(-row.new_logprobs.detach())": "the loss has no gradient; compute it from row.new_logprobs without detaching them",
    f'{LOSS}(-row.new_logprobs, {{f"m{{next(turn)}}": row.advantages}})': r"measures of one row are \['m0'\], of another \['m1'\]",
    "def weight(self, row): return TokenWeight(-torch.ones_like(row.new_logprobs))": "the weight of a trained token is negative or NaN",
    'def weight(self, row): return TokenWeight(row.new_logprobs * float("nan"))': "negative or NaN; expected 0 or above",
}


def odd_policy(folder: Path, model: Path, method: str) -> Policy:
    is_correction = "weight(self, row)" in method
    (folder / "odd.py").write_text(IMPORTS.replace("{base}", "Correction" if is_correction else "Grpo").replace("{method}", method))
    given: dict[str, Any] = {"corrections": ["odd.py:Odd"]} if is_correction else {"advantage_estimator": "odd.py:Odd"}
    config = RunConfig(algorithm=AlgorithmConfig(**given), trainer=TrainerConfig(max_tokens_per_gpu=40, params_dtype="float32"))
    return Policy.build(config, str(model), folder)


@pytest.mark.parametrize("method", ODD)
def test_a_wrong_result_of_a_plug_in_names_it_and_changes_nothing(
    tmp_path: Path, tied_model: Path, make_batch: Any, closing: Any, method: str
) -> None:
    policy = closing(odd_policy(tmp_path, tied_model, method))
    before = policy.logprobs(make_batch())
    with pytest.raises(HookError, match=rf"^{re.escape(str(tmp_path))}/odd\.py:Odd.*{ODD[method]}"):
        policy.train(make_batch())
    assert np.array_equal(np.concatenate(before), np.concatenate(policy.logprobs(make_batch())))


def test_measures_are_told_apart_by_name_whatever_their_order(tmp_path: Path, tied_model: Path, make_batch: Any, closing: Any) -> None:
    ones = "torch.ones_like(row.loss_mask)"
    measures = f'dict([("one", {ones}), ("two", 2 * {ones})][:: (-1) ** next(turn)])'
    policy = closing(odd_policy(tmp_path, tied_model, f"{LOSS}(-row.new_logprobs, {measures})"))
    metrics = policy.train(make_batch())
    assert (metrics["one"], metrics["two"]) == pytest.approx((1, 2))


def test_a_kl_coef_that_the_advantages_leave_out_is_refused() -> None:
    class NoKl(PolicyGradient):
        def advantages(self, batch: Batch) -> np.ndarray:
            return batch.per_token("reward")

    class WithKl(PolicyGradient):
        def advantages(self, batch: Batch) -> np.ndarray:
            return batch.to_tokens(rewards_with_kl(batch, self.config.algorithm))

    config = RunConfig(algorithm=AlgorithmConfig(kl_coef=0.1, use_rollout_logprobs=True))
    batch = batch_of([3, 2])
    columns = {name: column for name, column in batch.columns.items() if name != "advantages"} | {"reward": Column(np.ones(2), "sample")}
    batch = Batch(batch.ends, batch.group_of, columns).with_columns({"reference_logprobs": batch["rollout_logprobs"] - 1})
    assert Objective(config, WithKl(config, WithKl.Settings()), []).advantages(batch)
    with pytest.raises(HookError, match=r"NoKl: algorithm.kl_coef is 0.1, but its advantages do not read reference_logprobs"):
        Objective(config, NoKl(config, NoKl.Settings()), []).advantages(batch)


@pytest.mark.parametrize("key", ["hidden_dropout", "attention-dropout", "moe_input_jitter_eps"])
@pytest.mark.parametrize(("chosen", "refused"), [("own.py:OwnSft", 0), ("own.py:OwnGrpo", 1), ("sft", 0), ("grpo", 1)])
def test_noise_is_for_algorithms_that_are_supervised(tmp_path: Path, chosen: str, refused: int, key: str) -> None:
    imports = "from trainer.algorithms import grpo, sft\n"
    (tmp_path / "own.py").write_text(f"{imports}\n\nclass OwnSft(sft.Sft):\n    pass\n\n\nclass OwnGrpo(grpo.Grpo):\n    pass\n")
    estimator = chosen.replace("own.py", f"{tmp_path}/own.py")
    found = algorithm_problems(resolve(None, {"algorithm.advantage_estimator": estimator, f"megatron.{key}": "0.1"}, environ={}))
    assert len(found) == refused
    assert all(f"megatron.{key}: 0.1, but only sft trains with noise" in text for text in found)
    for off in ("0.0", "none"):
        assert not algorithm_problems(resolve(None, {"algorithm.advantage_estimator": estimator, f"megatron.{key}": off}, environ={}))


class Misnamed(PolicyGradient):
    """Its aggregation is none."""

    aggregation = "sequnce"


def test_an_unknown_aggregation_is_refused() -> None:
    config = RunConfig()
    found = objective_problems(Objective(config, Misnamed(config, Misnamed.Settings()), []))
    assert any("Misnamed: aggregation 'sequnce'; expected one of token, sequence, group, constant" in problem for problem in found)


class Broken(PolicyGradient):
    """Fails in its own code, or gives one loss for all tokens."""

    def advantages(self, batch: Any) -> Any:
        return {}["reward"]

    def loss(self, row: Any) -> TokenLoss:
        return TokenLoss(torch.tensor(0.0))


def test_what_a_plug_in_does_wrong_names_it_and_its_line() -> None:
    config = RunConfig()
    objective, batch = Objective(config, Broken(config, Broken.Settings()), []), batch_of([2])
    without = Batch(batch.ends, batch.group_of, {name: column for name, column in batch.columns.items() if name != "advantages"})
    with pytest.raises(HookError, match=r"test_own_algorithm:Broken failed at .*test_own_algorithm.py:\d+: KeyError: 'reward'"):
        objective.advantages(without)
    with pytest.raises(HookError, match=r"Broken: gave shape \[\]; expected \[1, 2\], one value of each token"):
        objective.loss(row_of(batch, [0.0, 0.0]))


def test_a_plug_in_that_fails_when_loaded_is_named(tmp_path: Path) -> None:
    resolved = config_of(tmp_path)
    (tmp_path / "broken.py").write_text("raise RuntimeError('no')\n")
    text = resolve(None, {"algorithm.advantage_estimator": f"{tmp_path}/broken.py:Mine"}, environ={})
    (problem,) = algorithm_problems(text)
    assert "broken.py failed when loaded" in problem
    assert resolved.config.algorithm.advantage_estimator == "ranked.py:Ranked"
    with pytest.raises(ConfigError, match=r"broken\.py"):
        Policy.build(text.config, "", tmp_path)
