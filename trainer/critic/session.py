"""What the critic's rank 0 has and the others have not: the groups of the bus, and the metrics of each step."""

import logging
from pathlib import Path

import numpy as np

from slimebus.bus.errors import DataError, Unreachable
from slimebus.bus.messages import Heartbeat
from slimebus.bus.samples import Sample
from slimebus.client.connect import BROKER_AWAY_S, broker_address
from slimebus.client.consumer import ConsumedGroup, Consumer
from slimebus.config import Resolved
from slimebus.telemetry.metrics import MetricsWriter, usage
from trainer.batches.batch import TrainingGroup
from trainer.batches.flatten import check_sample, is_failed

log = logging.getLogger("critic")

NAME, FIELD = "critic", "values"


class CriticSession:
    """The groups behind the critic's position, in order. It joins when it is made, before anything heavy is imported."""

    def __init__(self, resolved: Resolved, broker: str | None, *, take_over: bool = False) -> None:
        self.config = resolved.config
        keys: str | Path = resolved.keys_path or ""
        address, timeout_s = broker_address(resolved, broker), self.config.broker.connect_timeout_s
        self.consumer = Consumer(address, name=NAME, timeout_s=timeout_s, keys=keys, take_over=take_over)
        self.client = self.consumer.client
        self.writer = MetricsWriter(resolved.run_dir / "metrics", NAME, tensorboard=self.config.trainer.tensorboard)
        self.needs = ["reference_logprobs"] if self.config.algorithm.kl_coef else []
        self.read: list[ConsumedGroup] = []
        """Since the last training step."""
        self._lacking: list[ConsumedGroup] = []

    def begin(self, position: int, vocab_size: int) -> None:
        """Go on behind `position`, where a checkpoint ends, also where more was read after it."""
        self.vocab_size = vocab_size
        self.consumer.rewind(position)

    @property
    def position(self) -> int:
        """Of the newest group that was read."""
        return self.consumer.position

    @property
    def is_full(self) -> bool:
        """Whether a batch of groups is together."""
        return len(self.read) >= self.config.rollout.rollout_batch_size

    def take_groups(self, wait_s: float) -> list[TrainingGroup]:
        """The next groups that still lack values, at most until the batch is full; none when nothing came within wait_s seconds."""
        count, self._lacking = self.config.rollout.rollout_batch_size - len(self.read), []
        try:
            found = self.consumer.read(count, wait_s=wait_s, needs=self.needs, extras=[*self.needs, FIELD])
        except Unreachable as away:
            log.debug("%s; asked again", away.text)
            return []
        self.read += found
        self._lacking = [group for group in found if any(FIELD not in sample.extras for sample in group.samples)]
        for group in self._lacking:
            for sample in group.samples:  # what is not trained has a field all the same
                sample.extras = {**sample.extras, FIELD: np.zeros(len(sample.tokens), np.float32)}
        return self._trainable(self._lacking)

    def put(self, groups: list[TrainingGroup], values: list[np.ndarray]) -> None:
        """Put the values of the groups that `take_groups` gave, one array for each sample in order, and zeros for the samples left out."""
        samples = [sample for group in groups for sample in group.samples]
        for sample, own in zip(samples, values, strict=True):
            sample.extras[FIELD] = own
        self.consumer.put_all([(group, {FIELD: [sample.extras[FIELD] for sample in group.samples]}) for group in self._lacking])

    @property
    def has_new(self) -> bool:
        """Whether `take_groups` gave groups that lack values, also where the values are zeros alone."""
        return bool(self._lacking)

    @property
    def num_trainable(self) -> int:
        """Groups of the batch that have a sample to train."""
        return len(self._trainable(self.read))

    def batch(self) -> list[TrainingGroup]:
        """The groups read since the last call, as far as they are trained."""
        groups, self.read = self._trainable(self.read), []
        return groups

    def _trainable(self, read: list[ConsumedGroup]) -> list[TrainingGroup]:
        groups = [TrainingGroup(group.id, [s for i, s in enumerate(group.samples) if self._is_trainable(s, group.id, i)]) for group in read]
        return [group for group in groups if group.samples]

    def _is_trainable(self, sample: Sample, group: str, index: int) -> bool:
        if is_failed(sample):
            return False
        try:
            check_sample(sample, f"group {group}: sample {index}", self.vocab_size, reads_logprobs=False, fields=self.needs)
        except DataError as bad:
            log.error("left out: %s", bad.text)
            return False
        return True

    def record(self, step: int, metrics: dict[str, float]) -> None:
        """Write the metrics of a step, and log it."""
        values = metrics | {"position": float(self.position), "groups_skipped": float(self.consumer.num_skipped)} | usage()
        self.consumer.metrics = lambda: values
        self.writer.write(step, {name: round(value, 6) for name, value in values.items()})
        log.info(
            "step %d: value loss %.4f, explained variance %.3f, mean return %.3f, %.0f tokens in %.2f s after waiting %.2f s",
            *(step, metrics.get("loss", 0.0), metrics.get("explained_variance", 0.0), metrics.get("return", 0.0)),
            *(metrics.get("tokens", 0.0), metrics["train_s"], metrics["wait_s"]),
        )

    def confirm(self) -> None:
        """Return when the broker says that this is still the run's critic, or has ended with the run.

        Raises Fenced when another has taken its place.
        """
        try:
            self.client.call(Heartbeat(), timeout_s=self.consumer.patience_s(BROKER_AWAY_S))
        except Unreachable:
            if not self.consumer.is_finished:
                raise

    def close(self) -> None:
        """Release sockets, threads and files."""
        self.writer.close()
        self.consumer.close()
