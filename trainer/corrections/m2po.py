"""M2PO: Zheng et al., "Prosperity before Collapse: How Far Can Off-Policy RL Reach with Stale Data on LLMs?" (arXiv 2510.01161)."""

from collections.abc import Mapping

import numpy as np

from slimebus.config.schema import NonNegative
from trainer.batches.batch import Batch
from trainer.objective.clip import ratio_of
from trainer.objective.importance import log_ratios, log_weight
from trainer.objective.plugin import Correction, TokenWeight
from trainer.objective.row import Row


class M2po(Correction):
    """M p_new / p_rollout per token, without clip: M = 0 takes out tokens of {A > 0, d > 0} and {A < 0, d < 0} in order of decreasing d^2,
    d = log(p_new / p_rollout), until the mean of d^2 over the rest of them is at most m2po_tau. The denominator keeps what is masked.

    As in the paper, over the whole optimizer step on all ranks: d comes from a forward pass before it. (The authors' code chooses in each
    micro-batch, clips at one bound and counts what it clipped; AReaL's `m2_threshold` compares p_old, in both directions.)
    """

    needs_rollout_as_old = True

    class Settings(Correction.Settings, frozen=True):
        """Of the mask."""

        m2po_tau: NonNegative = 0.04
        """[nats^2] Largest mean square of d among the active tokens that are trained."""

    settings: Settings

    def needs(self) -> set[str]:
        return {"current_logprobs"}

    def prepare(self, part: Batch) -> Mapping[str, np.ndarray]:
        d = log_ratios(part, "current_logprobs")
        is_active = d * part["advantages"] > 0
        is_kept = np.ones(part.num_tokens, np.float32)
        is_kept[is_active] = largest_within(np.square(d[is_active]), self.settings.m2po_tau)
        return {"m2po_kept": is_kept}

    def weight(self, row: Row) -> TokenWeight:
        kept = row["m2po_kept"]
        return TokenWeight(kept * ratio_of(log_weight(row)), {"m2po_dropped": 1 - kept})


def largest_within(squares: np.ndarray, limit: float) -> np.ndarray:
    """[n] bool of [n]: all but the fewest of the largest ones, so that the mean of the rest is at most `limit`."""
    order = np.argsort(squares, kind="stable")
    means = np.cumsum(squares[order]) / np.arange(1, len(squares) + 1)  # rising, as what is added is
    kept = np.zeros(len(squares), bool)
    kept[order[: np.searchsorted(means, limit, side="right")]] = True
    return kept
