"""The critic: a value model on the policy's architecture, which learns returns.

N tokens of the batch   T tokens of one sample
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from slimebus.bus.errors import ConfigError
from slimebus.config import RunConfig
from trainer.algorithms.ppo import Ppo
from trainer.batches.batch import Batch, Column, TrainingGroup
from trainer.batches.packing import MicroBatch
from trainer.model import parallel, update
from trainer.model.learner import Learner
from trainer.model.optimizer import gather_weights
from trainer.model.update import loss_scale
from trainer.objective.aggregation import masked_sum, token_weights
from trainer.objective.objective import Objective
from trainer.objective.returns import gae, token_rewards
from trainer.objective.row import DeviceColumns


class Critic(Learner):
    """Every rank builds one and makes the same calls; rank 0 gives the groups, the others None."""

    role = "value"

    @staticmethod
    def checked(config: RunConfig, objective: Objective) -> RunConfig:
        """With the critic's learning rate. Raises ConfigError when the algorithm has no critic, and as check_config."""
        settings = settings_of(objective.algorithm)
        check_config(config)
        return replace(config, optimizer=replace(config.optimizer, lr=settings.critic_lr or config.optimizer.lr))

    def values(self, groups: Sequence[TrainingGroup] | None) -> list[np.ndarray]:
        """The value of what stands before each token, under the current weights, [T] f32 for each sample; 0 at each first token."""
        batch = self._broadcast_batch(groups, None)
        return np.split(self._forward(batch), batch.ends[:-1])

    def train(self, groups: Sequence[TrainingGroup] | None, *, num_steps: int = 1) -> dict[str, float]:
        """Train on groups of samples with the field `values`, in `num_steps` optimizer steps a pass; metrics on every rank
        (docs/critic.md).

        Raises SlimebusError `nonfinite`, as the policy.
        """
        batch = self._broadcast_batch(groups, None)
        batch = batch.with_columns(self._of_rank_0(lambda: {"returns": Column(self._returns(batch))}))
        parts = batch.cut_groups(num_steps) * self.config.rollout.num_passes_per_rollout
        made = [self._train_part(batch.select(part)) for part in parts]
        gather_weights(self.model)
        return update.merged_metrics(made) | {"lr": made[-1]["lr"]} | measures(batch)

    def _returns(self, batch: Batch) -> np.ndarray:
        """A + V of each trained token, [N] f32: what the values should have been, from the rewards and the values as they were."""
        s = settings_of(self.objective.algorithm)
        rewards = token_rewards(batch, self.config.algorithm)
        return gae(batch, rewards, batch.per_token("values"), gamma=s.gamma, lambd=s.lambd)[1].astype(np.float32)

    def _train_part(self, part: Batch) -> dict[str, float]:
        """One optimizer step on all of `part`, or none where nothing in it is trained."""
        (lr,), trained = self.learning_rates(1), float(np.count_nonzero(part["loss_mask"]))
        counts = {"samples": float(part.num_samples), "tokens": float(part.num_tokens), "tokens_trained": trained}
        found = update.NO_STEP | {"lr": lr}
        if trained:
            part = part.with_columns({"loss_weight": token_weights(part, "token", 1)})
            clip = settings_of(self.objective.algorithm).value_clip
            measures = self._gradient(part, lambda num_tokens, num_rows: loss_of_values(part, num_tokens, num_rows, clip))
            found = update.apply_gradient(self.optimizer, measures, lr, part.num_samples)
        self._count_update(found)
        return counts | found


def settings_of(algorithm: object) -> Ppo.Settings:
    """Those of PPO. Raises ConfigError for an algorithm that has no critic."""
    if not isinstance(algorithm, Ppo):
        name = type(algorithm).__name__.lower()
        raise ConfigError(f"algorithm.advantage_estimator: {name} has no critic; a critic needs ppo, or a class that derives from it")
    return algorithm.settings


def check_config(config: RunConfig) -> None:
    """Raise ConfigError where the trainer would not wait for the values, or its rewards have a KL that the critic cannot compute."""
    a = config.algorithm
    if "values" not in config.broker.required_fields:
        raise ConfigError("broker.required_fields: values is not among them; add it, so that every batch waits for the critic")
    if a.kl_coef and not (a.use_rollout_logprobs and "reference_logprobs" in config.broker.required_fields):
        raise ConfigError(
            f"algorithm.kl_coef: {a.kl_coef:g} puts a KL in the rewards, which the critic has no reference and no old policy for; use "
            "kl_loss_coef, or let a consumer put reference_logprobs (broker.required_fields) and set use_rollout_logprobs"
        )


def measures(batch: Batch) -> dict[str, float]:
    """How good the values were that the groups got when they came, over all trained tokens."""
    is_trained = batch["loss_mask"] > 0
    values, returns = batch.per_token("values")[is_trained].astype(np.float64), batch["returns"][is_trained].astype(np.float64)
    return {
        "explained_variance": explained_variance(values, returns),
        "value": float(values.mean()) if len(values) else 0.0,
        "return": float(returns.mean()) if len(returns) else 0.0,
        "reward": float(batch["reward"].mean()),
    }


def explained_variance(values: np.ndarray, returns: np.ndarray) -> float:
    """1 - Var(returns - values) / Var(returns): 1 for perfect values, 0 for a constant; 0 too where all returns are equal."""
    spread = np.var(returns) if len(returns) else 0.0
    return float(1 - np.var(returns - values) / spread) if spread > 0 else 0.0


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, value_clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2) / 2 per token, and where the clip took the gradient away.

    Baselines' PPO2; Engstrom et al., "Implementation Matters in Deep Policy Gradients" (2020), section 3. slime leaves out the half.
    """
    near = old_values + (values - old_values).clamp(-value_clip, value_clip)
    free, bound = (values - returns).square(), (near - returns).square()
    return 0.5 * torch.maximum(free, bound), (bound > free).float()


def loss_of_values(part: Batch, num_tokens: int, num_rows: int, value_clip: float) -> Any:
    """As update.loss_of_row; entry t of a column is the value of what stands before tokens[t].

    `part` has the columns `values` (from when it came), `returns` and `loss_weight`.
    """
    columns, scale = DeviceColumns(part, parallel.device()), loss_scale(num_rows)

    def reduce(micro: MicroBatch, values: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        def at(name: str) -> torch.Tensor:
            return columns.at(name, micro.source, micro.sample).masked_fill(micro.loss_mask == 0, 0.0)

        per_token, clipped = value_loss(values, at("values"), at("returns"), value_clip)
        loss = masked_sum(per_token * at("loss_weight"), micro.loss_mask)
        report = {"loss": loss.detach() * num_tokens, "value_clipfrac": masked_sum(clipped, micro.loss_mask)}
        return loss * scale, report

    return reduce
