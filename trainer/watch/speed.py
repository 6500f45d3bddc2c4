"""Tokens a second, and the share of the device's peak that training makes use of (MFU)."""

import math
from collections.abc import Mapping

import torch

from trainer.checkpoint import trained_state
from trainer.model import parallel
from trainer.model.policy import Policy
from trainer.session.step_batch import StepBatch

PEAK_FLOPS = {
    **{"B200": 2250e12, "H200": 989e12, "H800": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "GH200": 989e12, "H20": 148e12},
    **{"A100": 312e12, "A800": 312e12, "L40S": 362e12, "L40": 181e12, "A10": 125e12, "4090": 165e12},
}
"""Dense bfloat16, of NVIDIA's data sheets, by a part of the device's name; the longest part that fits counts."""


def peak_flops(name: str) -> float | None:
    """Of one device in bfloat16; None where it is not known."""
    fits = [part for part in PEAK_FLOPS if part in name]
    return PEAK_FLOPS[max(fits, key=len)] if fits else None


def used_parameters(shapes: Mapping[str, tuple[int, ...]], *, is_tied: bool, share_of_experts: float) -> float:
    """Parameters that a token is multiplied with: no input embedding, unless the output uses it; of experts those that it is sent to."""
    used = 0.0
    for key, shape in shapes.items():
        if key == "embedding.word_embeddings.weight" and not is_tied:
            continue
        used += math.prod(shape) * (share_of_experts if ".experts." in key else 1.0)
    return used


def step_flops(lengths: list[int], parameters: float, attention_width: int) -> float:
    """Of forward and backward over sequences of these lengths: for each token 6 N + 12 L H Q T (PaLM, arXiv:2204.02311, appendix B).

    parameters: N; attention_width: L H Q, layers x heads x head size. Recomputation and passes that only compute logprobs do not count.
    """
    return 6.0 * parameters * sum(lengths) + 12.0 * attention_width * sum(length * length for length in lengths)


class Speed:
    """Metrics of speed, on rank 0. Every rank makes one."""

    def __init__(self, policy: Policy) -> None:
        config, self.num_passes = policy.model.config, policy.config.rollout.num_passes_per_rollout
        mine = {local.key: local.whole for local in trained_state.weights(policy)}
        shapes = {key: shape for of_rank in parallel.gather(mine, dict[str, tuple[int, ...]]) for key, shape in of_rank.items()}
        share = (config.moe_router_topk / config.num_moe_experts) if config.num_moe_experts else 1.0
        is_tied = policy.model.gpt.share_embeddings_and_output_weights
        self.parameters = used_parameters(shapes, is_tied=is_tied, share_of_experts=share)
        self.attention_width = config.num_layers * config.num_attention_heads * config.kv_channels
        is_bf16 = config.params_dtype is torch.bfloat16
        one = peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() and is_bf16 else None
        self.peak = None if one is None else one * torch.distributed.get_world_size()

    def of(self, batch: StepBatch, train_s: float) -> dict[str, float]:
        """Of the groups that had a gradient, in each pass. tokens_per_s: their tokens by the time of the step; mfu: of forward and backward
        over them."""
        lengths = [len(sample.tokens) for group in batch.groups if group.has_gradient for sample in group.samples] * self.num_passes
        metrics = {"tokens_per_s": sum(lengths) / max(train_s, 1e-9)}
        if self.peak is not None:
            metrics["mfu"] = step_flops(lengths, self.parameters, self.attention_width) / (max(train_s, 1e-9) * self.peak)
        return metrics
