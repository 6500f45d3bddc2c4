"""Where batches come from: the bus (trainer/broker_session.py), a folder (trainer/replay.py), or a test."""

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from trainer.batches.step_batch import StepBatch
    from trainer.checkpoint.manifest import Progress


class EndOfBatches(Exception):
    """There is no batch of this step and there will be none: the loop stops before it."""


class BatchSource(Protocol):
    """What the loop asks of it, on rank 0 alone. Steps are taken in order, from where it began; each is committed when trained."""

    def begin(self, start: "Progress", publication: Any, vocab_size: int) -> None:
        """Training begins where `start` ends; the versions are those of `publication`. Token ids are below vocab_size."""

    def take(self, step: int, wait_s: float) -> "StepBatch | None":
        """The batch of `step`, or None when it is not here after wait_s seconds. Raises EndOfBatches."""

    def commit(self, step: int, batch: "StepBatch", checkpoint: int, metrics: dict[str, float]) -> None:
        """`step` is trained. checkpoint: the first step whose batch may be needed again."""

    def finish(self) -> None:
        """All steps are trained."""
