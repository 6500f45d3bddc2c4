"""The frozen reference: weights in host memory that take the policy's place on the device for a forward pass.

        before            inside `swapped_in`    after
device  policy            reference              policy
host    reference         policy                 reference
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trainer.model.gpt import Model


class Reference:
    """The weights that a model had when this was made, or when `refresh` was last called.

    They are exchanged with the model's, tensor by tensor: the device never holds more than one copy, nor does the host (but for one
    tensor). On a CPU the two only trade places, and nothing is copied.
    """

    def __init__(self, model: Model) -> None:
        found = model.gpt.state_dict(keep_vars=True).values()
        self._live = list({id(tensor): tensor for tensor in found if isinstance(tensor, torch.Tensor)}.values())
        self._held = [host_copy(tensor) for tensor in self._live]
        self.is_refreshed = False
        """Whether it is another than the model began with, so that a checkpoint must hold it."""

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Inside, the model has these weights; outside its own again, bit by bit. No training inside."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the model's weights as they are now."""
        for live, held in zip(self._live, self._held, strict=True):
            held.copy_(live)
        self.is_refreshed = True

    @torch.no_grad()
    def _exchange(self) -> None:
        for index, (live, held) in enumerate(zip(self._live, self._held, strict=True)):
            self._held[index] = swap_by_copy(live, held) if live.is_cuda else swap_by_pointer(live, held)


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor in host memory, page-locked where they come from a GPU."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda).copy_(tensor.detach())


def swap_by_copy(live: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """Give `live` the values of `held`, where it is; the values that it had, in host memory."""
    before = host_copy(live)
    live.data.copy_(held)
    return before


def swap_by_pointer(live: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """Give `live` the memory of `held`; the memory that it had."""
    before = live.data
    live.data = held
    return before
