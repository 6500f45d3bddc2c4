"""What the trainer's rank 0 has and the others have not: the broker's batches and the metrics of each step."""

import logging
import threading
import time
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np

from slimebus.config import Resolved
from slimebus.errors import SlimebusError
from slimebus.messages import Heartbeat, HeartbeatReply, Welcome
from slimebus.metrics import MetricsWriter
from slimebus.transport.client import Client
from trainer.batch import Group, Sample
from trainer.feed import Feed, FetchedBatch, token_lags
from trainer.publishing import Publishing
from trainer.step_plan import StepPlan

log = logging.getLogger("trainer")

ZERO_VARIANCE = "zero_variance"
CONFIRM_TIMEOUT_S = 600.0
"""As long as a commit waits for a broker that is away."""


class StepBatch:
    """A fetched batch in the trainer's terms."""

    def __init__(self, fetched: FetchedBatch) -> None:
        self.fetched = fetched
        self.groups = [Group(g.id, [_sample(s) for s in g.samples]) for g in fetched.groups]

    def parts(self, count: int) -> list[list[Group]]:
        """The groups in `count` parts of almost equal numbers, one for each optimizer step."""
        edges = [len(self.groups) * i // count for i in range(count + 1)]
        return [self.groups[start:end] for start, end in pairwise(edges)]

    def plan(self, max_parts: int) -> StepPlan:
        """How this step is trained, in at most so many parts; a batch of fewer groups has fewer of them."""
        return StepPlan(num_parts=min(max_parts, len(self.groups)), publishes=self.fetched.next_version > self.fetched.version)

    def record(self) -> dict[str, Any]:
        """What this step is given: its groups by id, and how many trained tokens have which staleness."""
        tokens: Counter[int] = Counter()
        for group in self.fetched.groups:
            for sample in group.samples:
                tokens.update(token_lags(sample.versions, sample.loss_mask, self.fetched.version))
        lags = {str(lag): count for lag, count in sorted(tokens.items())}
        return {"version": self.fetched.version, "groups": [g.id for g in self.fetched.groups], "lag_tokens": lags}

    def without_gradient(self) -> dict[str, str]:
        """Groups whose rewards are all equal: their advantages are zero."""
        return {g.id: ZERO_VARIANCE for g in self.groups if len({s.reward for s in g.samples}) <= 1}

    def metrics(self) -> dict[str, float]:
        """Mean reward and staleness of the samples."""
        rewards = [s.reward for g in self.groups for s in g.samples]
        lengths = [len(s.tokens) for g in self.groups for s in g.samples]
        lags = self.fetched.lags
        return {
            "reward": float(np.mean(rewards)) if rewards else 0.0,
            "lag_mean": float(np.mean(lags)) if lags else 0.0,
            "lag_max": float(max(lags, default=0)),
            "num_samples": float(len(rewards)),
            "num_tokens": float(sum(lengths)),
        }


def _sample(s: Any) -> Sample:
    return Sample(tokens=s.tokens, loss_mask=s.loss_mask, rollout_logprobs=s.rollout_logprobs, reward=s.reward or 0.0)


class Bus:
    """Rank 0's connection to everyone else. `begin` starts a timeline, `finish` ends the run in good order."""

    def __init__(self, resolved: Resolved, client: Client, welcome: Welcome, *, trains_without_advantage: bool) -> None:
        self.resolved, self.config, self.client = resolved, resolved.config, client
        self.trains_without_advantage = trains_without_advantage
        self.feed = Feed(client, self.config)
        self.publishing: Publishing | None = None
        self.writer = MetricsWriter(resolved.run_dir / "metrics", "trainer", tensorboard=self.config.trainer.tensorboard)
        self.batches = MetricsWriter(resolved.run_dir / "metrics", "batches")
        self.lost: SlimebusError | None = None
        self._finished = threading.Event()
        self._metrics: dict[str, float] = {}
        self._started = time.monotonic()
        client.keep_alive(welcome.heartbeat_s, self._beat, self._on_beat, self._on_lost)

    def begin(self, step: int, version: int, publishing: Publishing) -> None:
        """A new lineage begins at `version`; the broker takes back what this timeline has not trained."""
        self.publishing = publishing
        self.feed.resume(step, version, publishing.lineage)
        log.info("training from step %d of %d", step, self.config.rollout.num_rollout)

    def take(self, step: int) -> StepBatch:
        """The batch of `step`. Raises Fenced when another trainer took over.

        It is on record (metrics/batches.jsonl) before it is trained: of rows with one step, the last is what the weights learned from.
        """
        if self.lost is not None:
            raise self.lost
        batch = StepBatch(self.feed.take(step))
        assert self.publishing is not None  # begin() came first
        self.batches.write(step, {"lineage": self.publishing.lineage, **batch.record()})
        return batch

    def commit(self, step: int, batch: StepBatch, checkpoint: int, metrics: dict[str, float]) -> None:
        """Tell the broker and the records that `step` is trained."""
        values = metrics | batch.metrics() | {"elapsed_s": time.monotonic() - self._started}
        values |= {f"weights_{name}": value for name, value in (self.publishing.metrics() if self.publishing else {}).items()}
        unused = {} if self.trains_without_advantage else batch.without_gradient()
        self.feed.commit(step, checkpoint=checkpoint, unused=unused, metrics=values)
        self.writer.write(step, {name: round(value, 6) for name, value in values.items()})
        self._metrics = values
        log.info(
            "step %d: reward %.3f, loss %.4f, lag %.1f (max %.0f), %.0f tokens in %.2f s after waiting %.2f s",
            *(step, values["reward"], values.get("loss", 0.0), values["lag_mean"], values["lag_max"]),
            *(values["num_tokens"], values["train_s"], values["wait_s"]),
        )

    def confirm(self) -> None:
        """Return when the broker says that this is still the run's trainer. Raises Fenced when another has taken its place."""
        self.client.call(self._beat(), timeout_s=CONFIRM_TIMEOUT_S)

    def finish(self) -> None:
        """Serve the last version until the broker says that evaluation and workers are done, then stop."""
        assert self.publishing is not None  # begin() came first
        self.publishing.wait()
        self.feed.finish("all steps are trained")
        if not self._finished.wait(self.config.broker.finish_wait_s + self.config.rollout.generate_timeout_s):
            log.warning("left before the broker said that the run is finished")

    def close(self) -> None:
        """Release sockets, threads and files."""
        self.feed.close()
        self.writer.close()
        self.batches.close()

    def _beat(self) -> Heartbeat:
        lineage = self.publishing.lineage if self.publishing else ""
        return Heartbeat(state="training", lineage=lineage, metrics=self._metrics)

    def _on_beat(self, reply: HeartbeatReply) -> None:
        if self.publishing is not None:
            self.publishing.heard(reply.lineage, reply.version)
        if reply.finished:
            self._finished.set()

    def _on_lost(self, problem: SlimebusError) -> None:
        self.lost = problem
        log.error("%s", problem.text)
