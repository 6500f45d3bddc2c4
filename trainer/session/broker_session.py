"""What the trainer's rank 0 has and the others have not: the broker's batches, the metrics of each step, and what others measure
for TensorBoard and W&B."""

import logging
import threading
import time
from typing import TYPE_CHECKING

from blake3 import blake3

from slimebus.bus.errors import SlimebusError
from slimebus.bus.messages import Finish, Heartbeat, HeartbeatReply
from slimebus.client import connect
from slimebus.config import Resolved
from slimebus.config.saved import without_secrets
from slimebus.telemetry.metrics import MetricsWriter, usage
from trainer.checkpoint.folder import Progress
from trainer.session.step_batch import IdleSteps, StepBatch

if TYPE_CHECKING:
    from trainer.publish.publication import Publication
    from trainer.session.batch_client import BatchClient
from collections import defaultdict
from statistics import fmean
from typing import Any

from slimebus.bus.transport.client import Client
from slimebus.telemetry.metrics import grouped
from slimebus.view.run_status import ask_status

log = logging.getLogger("trainer")

TRACK_S = 10.0
ANSWER_S = 5.0
OF_EVALUATION = ("mean_reward", "low", "high", "num_samples", "num_failed")


class Tracker:
    """Asks the broker every TRACK_S seconds from a thread of its own, from `start` to `close`, which asks once more."""

    def __init__(self, client: Client, writer: MetricsWriter) -> None:
        self.client, self.writer = client, writer
        self._told: set[tuple[str, str]] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="tracker", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closing.wait(TRACK_S)
            try:
                status = ask_status(self.client, ANSWER_S)
            except SlimebusError:
                continue  # the broker is away: the run's own patience is elsewhere
            self.track(status)

    def track(self, status: dict[str, Any]) -> None:
        """Tell what a status says, and each evaluation that is done once, at the step it was made in."""
        for row in status["evaluations"]:
            if row["done"] and (row["key"], row["dataset"]) not in self._told:
                self._told.add((row["key"], row["dataset"]))
                self.writer.track(row["step"], {f"eval/{row['dataset']}/{name}": row[name] for name in OF_EVALUATION})
        self.writer.track(status["step"], scalars(status))

    def close(self) -> None:
        """The last status is forwarded too."""
        self._closing.set()
        self._thread.join(2 * ANSWER_S)


def scalars(status: dict[str, Any]) -> dict[str, float]:
    """Of a status: groups by phase, waste; over all workers sums, and means of what is measured in seconds."""
    found = {f"broker/{phase}": count for phase, count in status["groups"].items()}
    found |= {f"broker/wasted_{what}": sum(waste[what] for waste in status["waste"].values()) for what in ("groups", "tokens")}
    workers = defaultdict[str, list[float]](list)
    for client in status["clients"]:
        for name, value in client["metrics"].items() if client["role"] == "rollout" else ():
            workers[name].append(value)
    found["rollout/workers"] = status["pace"]["workers"]
    return found | {grouped("rollout", name): fmean(values) if name.endswith("_s") else sum(values) for name, values in workers.items()}


FINISH_WAIT_S = 20.0
"""Besides what a group may take: after the last step the trainer still serves weights to workers that have not left."""


class BrokerSession:
    """Rank 0's connection to everyone else. `begin` starts a timeline, `finish` ends the run in good order.

    It joins when it is made, before anything heavy is imported: a model may take minutes to load, and the broker hears meanwhile that
    this process lives. broker: its address, where another than the config's was given. take_over: replace a living trainer.
    """

    publication: "Publication"
    batch_client: "BatchClient | None" = None
    """Both since `begin`."""
    tracker: Tracker | None = None

    def __init__(self, resolved: Resolved, broker: str | None, *, take_over: bool = False) -> None:
        self.config, self.base = resolved.config, resolved.base
        self.client = connect.make_client(resolved, broker, role="trainer", name="trainer")
        self.lost: SlimebusError | None = None
        self._finished = threading.Event()
        self._metrics: dict[str, float] = {}
        self._idle = IdleSteps()
        welcome = connect.join(self.client, "trainer", self.config.broker.connect_timeout_s, take_over=take_over)
        connect.report_starting(self.client, welcome, "loads its model", self._on_lost)
        self._beat_every_s = welcome.heartbeat_s
        t, run = self.config.trainer, {"name": self.config.name, "config": without_secrets(self.config)}
        run["id"] = blake3(str(resolved.run_dir.resolve()).encode()).hexdigest()[:16]  # a resumed run goes on as the same one
        self.writer = MetricsWriter(resolved.run_dir / "metrics", "trainer", tensorboard=t.tensorboard, wandb=run if t.wandb else None)
        self.batches = MetricsWriter(resolved.run_dir / "metrics", "batches")

    def begin(self, start: Progress, publication: "Publication", vocab_size: int) -> None:
        """A new lineage begins where `start` ends; the broker takes back what this timeline has not trained.

        Raises Fenced when another trainer has taken this one's place meanwhile.
        """
        from trainer.objective.build_objective import build_objective
        from trainer.session.batch_client import BatchClient

        if self.lost is not None:
            raise self.lost
        self._started = time.monotonic()
        objective = build_objective(self.config, self.base)
        self.publication, self.batch_client = publication, BatchClient(self.client, self.config, vocab_size, objective)
        self.client.keep_alive(self._beat_every_s, self._beat, self._on_beat, self._on_lost)
        if self.config.trainer.tensorboard or self.config.trainer.wandb:
            self.tracker = Tracker(self.client, self.writer)
        self.batch_client.resume(start.step, start.version, publication.lineage, start.lineage)
        log.info("training from step %d of %d", start.step, self.config.rollout.num_rollout)

    def take_batch(self, step: int, wait_s: float) -> StepBatch | None:
        """The batch of `step`, or None when it is not here after wait_s seconds. Raises Fenced when another trainer took over."""
        if self.lost is not None:
            raise self.lost
        assert self.batch_client is not None  # begin() came first
        return self.batch_client.take_batch(step, wait_s)

    def record(self, batch: StepBatch) -> None:
        """Into metrics/batches.jsonl, before it is trained: of rows with one step, the last is what the weights learned from."""
        self.batches.write(batch.step, {"lineage": self.publication.lineage, **batch.record()})

    def commit(self, step: int, batch: StepBatch, checkpoint: int, metrics: dict[str, float]) -> None:
        """Tell the broker and the records that `step` is trained."""
        assert self.batch_client is not None  # begin() came first
        values = metrics | batch.metrics() | {"elapsed_s": time.monotonic() - self._started}
        values |= {f"weights_{name}": value for name, value in self.publication.metrics().items()} | usage()
        self.batch_client.commit(step, checkpoint=checkpoint, unused=batch.without_gradient(), metrics=values)
        self.writer.write(step, {name: round(value, 6) for name, value in values.items()})
        self._metrics = values
        if warning := self._idle.warning(batch):
            log.warning("step %d: %s", step, warning)
        log.info(
            "step %d: reward %.3f, loss %.4f, lag %.1f (max %.0f), %.0f tokens (%.0f trained) in %.2f s after waiting %.2f s",
            *(step, values["reward"], values.get("loss", 0.0), values["lag_mean"], values["lag_max"]),
            *(values["num_tokens"], values["tokens_trained"], values["train_s"], values["wait_s"]),
        )

    @property
    def has_trained(self) -> bool:
        """Whether a step of this process is committed."""
        return bool(self._metrics)

    def confirm(self) -> None:
        """Return when the broker says that this is still the run's trainer. Raises Fenced when another has taken its place."""
        self.client.call(self._beat(), timeout_s=connect.BROKER_AWAY_S)

    def finish(self) -> None:
        """Serve the last version until the broker says that evaluation and workers are done, then stop."""
        self.publication.wait()
        self.client.call(Finish(reason="all steps are trained"), timeout_s=connect.BROKER_AWAY_S)
        if not self._finished.wait(FINISH_WAIT_S + self.config.rollout.generate_timeout_s):
            log.warning("left before the broker said that the run is finished")

    def close(self) -> None:
        """Release sockets, threads and files."""
        if self.batch_client is not None:
            self.batch_client.close()
        if self.tracker is not None:
            self.tracker.close()
        for part in (self.writer, self.batches):
            part.close()
        self.client.close()

    def _beat(self) -> Heartbeat:
        return Heartbeat(state="training", lineage=self.publication.lineage, metrics=self._metrics)

    def _on_beat(self, reply: HeartbeatReply) -> None:
        self.publication.on_heartbeat(reply.lineage, reply.version)
        if reply.finished:
            self._finished.set()

    def _on_lost(self, problem: SlimebusError) -> None:
        self.lost = problem
        log.error("%s", problem.text)
