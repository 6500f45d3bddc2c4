"""What makes a critic of a GPT: one number for each position in place of logits."""

from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch.nn import functional


class ValueHead(torch.nn.Module):
    """[s, b, 1] f32 from hidden states [s, b, h], called as megatron's output layer. Zero at first: all values begin at 0.

    Whole on each tensor-parallel rank; with sequence parallelism each computes its part of s, and all get all of it.
    """

    def __init__(self, settings: Any, device: torch.device) -> None:
        super().__init__()
        self.sequence_parallel = bool(settings.sequence_parallel)
        self.weight = torch.nn.Parameter(torch.zeros(1, settings.hidden_size, dtype=settings.params_dtype, device=device))
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=settings.params_dtype, device=device))
        for parameter in self.parameters():  # megatron then adds up the gradients of the parts
            parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor, weight: Any = None, runtime_gather_output: Any = None) -> tuple[torch.Tensor, None]:
        values = functional.linear(hidden.float(), self.weight.float(), self.bias.float())
        if self.sequence_parallel:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def put_value_head(gpt: Any, device: torch.device) -> None:
    """Replace the output layer of a loaded GPTModel; every pipeline stage calls it."""
    if gpt.post_process:
        gpt.output_layer = ValueHead(gpt.config, device)
    gpt.share_embeddings_and_output_weights = False  # the embedding is no output layer any more
