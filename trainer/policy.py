"""The model being trained, as the loop sees it: train, log-probabilities, weights by Hugging Face name, checkpoints."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slimebus.errors import DataError
from trainer import cuda_bridge, parallel
from trainer.settings import TrainerSettings, needs_old_pass, needs_reference

if TYPE_CHECKING:
    import torch

    from trainer.batch import Batch, TokenBatch
    from trainer.hf_export import HfExport


class Policy:
    """Every rank builds one and makes the same calls; rank 0 gives the batch, the others None."""

    def __init__(self, settings: TrainerSettings, model: Any, optimizer: Any, reference: Any = None) -> None:
        self.settings, self.model, self.optimizer, self.reference = settings, model, optimizer, reference
        self.num_updates = 0
        """Steps of the learning-rate schedule done so far; one for each train()."""
        self._export: HfExport | None = None

    @classmethod
    def build(cls, settings: TrainerSettings) -> "Policy":
        """Join the other ranks, build the model with its weights, the optimizer, and for a KL term the frozen reference.

        The reference has the weights of `hf_checkpoint`, also in a run that is resumed. `close` undoes it all.

        Raises ConfigError or DataError with one line when the settings, the layout or the model directory do not fit.
        """
        with cuda_bridge.library_warnings_ignored():
            parallel.start(settings.model)
            try:
                from trainer.model import build_model
                from trainer.optimizer import build_optimizer

                model = build_model(settings.model)
                reference = build_model(settings.model, is_trained=False) if needs_reference(settings.algorithm) else None
                return cls(settings, model, build_optimizer(settings.optimizer, model), reference)
            except BaseException:
                parallel.stop()
                raise

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return parallel.is_main_rank()

    def train(self, batch: "Batch | None", *, reference_logprobs: Sequence[np.ndarray] | None = None) -> dict[str, float]:
        """One optimizer step on a batch of groups; metrics on every rank (docs/algorithms.md lists them).

        `reference_logprobs` [T] per sample in batch order replaces what the frozen reference would say. Raises DataError for a
        malformed sample.
        """
        from trainer.optimizer import learning_rate, set_learning_rate
        from trainer.update import train_step

        tokens = self._shared(batch, reference_logprobs)
        if self.reference is not None and reference_logprobs is None:
            tokens = tokens.with_reference_logprobs(self._logprobs(tokens, self.reference))
        if needs_old_pass(self.settings.algorithm):
            tokens = tokens.with_old_logprobs(self._logprobs(tokens, self.model))
        lr = learning_rate(self.settings.optimizer, self.num_updates)
        set_learning_rate(self.optimizer, lr)
        metrics = train_step(self.model, self.optimizer, tokens, self.settings.algorithm, self.settings.max_tokens_per_gpu)
        self.num_updates += 1
        return metrics | {"lr": lr}

    def logprobs(self, batch: "Batch | None") -> list[np.ndarray]:
        """Log-probability of every token under the current weights, [T] f32 for each sample in batch order; 0 at each first token."""
        tokens = self._shared(batch)
        return tokens.split(self._logprobs(tokens, self.model))

    def hf_tensors(self) -> Iterator[tuple[str, "torch.Tensor"]]:
        """(name, tensor) of the whole model on rank 0, nothing elsewhere; every rank runs it to its end.

        Tensors may be views of the live weights: use or copy them before the next train().
        """
        yield from self._exporter().tensors()

    def owned_tensors(self) -> Iterator[tuple[str, "torch.Tensor"]]:
        """(name, tensor) of what this rank owns of the model, nothing on most ranks; every rank runs it to its end. As hf_tensors."""
        yield from self._exporter().owned_tensors()

    def owners(self) -> list[int]:
        """The ranks that own tensors, rank 0 first: one for each pipeline stage. Every rank calls it."""
        return list(self._exporter().owners)

    def _exporter(self) -> "HfExport":
        if self._export is None:
            from trainer.hf_export import HfExport

            self._export = HfExport(self.model)
        return self._export

    def save_hf(self, folder: str) -> None:
        """Write a directory that transformers reloads with equal weights: safetensors, config and the tokenizer it came with."""
        tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in self.hf_tensors()}
        if self.is_main:
            from trainer.hf_folder import write_folder

            write_folder(folder, tensors, self.settings.model.hf_checkpoint, self.settings.model.dtype)

    def save_checkpoint(
        self,
        folder: str,
        step: int,
        extra: dict[str, Any] | None = None,
        *,
        keep: int = 2,
        confirm: Callable[[], None] = lambda: None,
    ) -> None:
        """Write `folder`/step_N and point `folder`/latest at it once it is whole; the newest `keep` remain. Every rank calls it.

        `extra` is a small JSON dictionary (rank 0's counts) that load_checkpoint gives back. confirm: raises on the main rank when this
        process may not write checkpoints any more; then the one before stays the latest.
        """
        from trainer.checkpoint import save_checkpoint

        state = {"step": step, "num_updates": self.num_updates, "extra": extra or {}}
        save_checkpoint(folder, self.model, self.optimizer, state, keep=keep, confirm=confirm)

    def load_checkpoint(self, folder: str) -> tuple[int, dict[str, Any]]:
        """Continue from the newest checkpoint under `folder` exactly as if there had been no stop; (step, extra). Every rank calls it.

        Raises DataError when there is none: trainer.checkpoint_folder.latest_checkpoint tells.
        """
        from trainer.checkpoint import load_checkpoint
        from trainer.checkpoint_folder import latest_checkpoint

        path = latest_checkpoint(folder) if self.is_main else None
        name = parallel.broadcast_bytes(path.name.encode() if path else b"").decode()
        if not name:
            raise DataError(f"{folder}: no checkpoint to resume from (no file named latest)")
        state = load_checkpoint(Path(folder) / name, self.model, self.optimizer)
        self.num_updates = state["num_updates"]
        return state["step"], state["extra"]

    def close(self) -> None:
        """Leave the other ranks."""
        parallel.stop()

    def _logprobs(self, tokens: "TokenBatch", model: Any) -> np.ndarray:
        from trainer.update import compute_logprobs

        return compute_logprobs(model, tokens, self.settings.max_tokens_per_gpu)

    def _shared(self, batch: "Batch | None", reference_logprobs: Sequence[np.ndarray] | None = None) -> "TokenBatch":
        """The batch with its advantages, on every rank."""
        from trainer.batch import prepare, share

        return share(None if batch is None else prepare(batch, self.settings.algorithm, self.model.vocab_size, reference_logprobs))
