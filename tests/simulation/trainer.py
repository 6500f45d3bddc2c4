"""A simulated trainer: step after step as trainer/loop.py does it, with one batch asked ahead; keeps its own account.

It checks what it is handed by itself: age, timeline, repetition. Nothing here asks the state machine what is right.
"""

from typing import TYPE_CHECKING, Any

import msgspec
from simulation.account import Steps
from simulation.actor import Actor, Request, require
from simulation.clock import Act
from simulation.worker import Truth

from slimebus import messages as m

if TYPE_CHECKING:
    from simulation.world import World

BATCH_WAIT_S = 3.0
MEAN_STEP_S = 0.5
CHECKPOINT_CHANCE = 0.4


class Checkpoint(msgspec.Struct, frozen=True):
    """What a trainer can go on from: the step to train next and what was trained before."""

    step: int = 0
    trained: Steps = {}


class Trainer(Actor):
    """One trainer process, begun from the newest of `checkpoints`. `trained` is what its timeline has trained."""

    role = "trainer"

    def __init__(self, world: "World", name: str, checkpoints: list[Checkpoint]) -> None:
        self.checkpoints = checkpoints
        start = checkpoints[-1]
        self.step, self.trained = start.step, dict(start.trained)
        self.version = world.version_of(start.step)
        self.lineage = f"{name}-{world.timeline.serial()}"
        self.batches: dict[int, m.BatchReply] = {}
        self.loaded: set[int] = set()
        self.asked: set[int] = set()
        self.announced = m.NO_VERSION
        self.is_training = self.is_done = self.has_resumed = False
        super().__init__(world, name)

    def crash(self, *, keep: int = -1) -> None:
        """kill -9; it starts again from its newest checkpoint, or from an older one with `keep` of them."""
        self.die()
        checkpoints = self.checkpoints[: max(1, keep)] if keep >= 0 else self.checkpoints
        self.world.timeline.later(self.world.random.expovariate(0.5), lambda: self._start_again(checkpoints))

    def _start_again(self, checkpoints: list[Checkpoint]) -> None:
        if self.world.trainer is self:
            self.world.trainer = Trainer(self.world, self.name, checkpoints)

    # --- timeline ---

    def begin(self, welcome: m.Welcome) -> None:
        self.ask(m.Resume(step=self.step, version=self.version, lineage=self.lineage), lambda *_: self._resumed())

    def _resumed(self) -> None:
        self.has_resumed = True
        self.world.trace(f"{self.name} is resumed at step {self.step}, version {self.version}, lineage {self.lineage}")
        self._publish(self._next)

    def _publish(self, then: Act) -> None:
        self.world.account.published(self)
        version = self.version

        def published(*_: Any) -> None:
            self.announced = version
            then()

        self.ask(m.Publish(lineage=self.lineage, version=version, publishers=["x"]), published)

    def beaten(self, reply: m.HeartbeatReply) -> None:
        """A broker that lost its last moments may have to be told again."""
        if reply.lineage == self.lineage and reply.version < self.announced:
            self._publish(lambda: None)

    def _has_steps(self, step: int) -> bool:
        return self.world.rules.num_steps is None or step < self.world.rules.num_steps

    # --- batches ---

    def _next(self) -> None:
        if not self._has_steps(self.step):
            self._finish()
            return
        for step in (self.step, self.step + 1):
            if self._has_steps(step) and step not in self.asked:
                self.asked.add(step)
                self._ask_batch(step)
        self._train_if_loaded()

    def _ask_batch(self, step: int) -> None:
        self.ask(m.Batch(step=step, wait_s=BATCH_WAIT_S, trained=self.step), lambda reply, _: self._got_batch(step, reply))

    def _got_batch(self, step: int, reply: m.BatchReply) -> None:
        if not reply.groups:
            self._ask_batch(step)
            return
        self.batches[step] = reply
        self.ask(m.Fetch(groups=[g.group for g in reply.groups]), lambda answer, bulk: self._fetched(step, answer, bulk))

    def _fetched(self, step: int, reply: m.FetchReply, bulk: list[Any]) -> None:
        groups, start = self.batches[step].groups, 0
        require(len(reply.num_frames) == len(groups), f"{len(reply.num_frames)} payloads for {len(groups)} groups")
        for group, count in zip(groups, reply.num_frames, strict=True):
            self._check_payload(step, group, bulk[start : start + count])
            start += count
        self.loaded.add(step)
        self._train_if_loaded()

    def _check_payload(self, step: int, group: m.BatchGroup, frames: list[Any]) -> None:
        """The group is what was asked for, fresh enough for its step and of this timeline, by what its makers say."""
        put = msgspec.msgpack.decode(frames[0], type=m.Put)
        truth = msgspec.msgpack.decode(frames[1], type=Truth)
        require(put.group == truth.group == group.group, f"asked for {group.group}, got {put.group}")
        require(len(truth.trained) == group.num_samples, f"{group.group}: {group.num_samples} samples, {len(truth.trained)} are good")
        versions = [v for trained in truth.trained for v in trained if v != m.NO_VERSION]
        oldest = min(versions, default=m.NO_VERSION)
        require(oldest == group.oldest_version, f"{group.group} is of version {oldest}, the broker says {group.oldest_version}")
        trained_at = self.world.version_of(step)
        bound = self.world.bound_of(self.batches[step])
        lag = trained_at - oldest if versions else 0
        require(0 <= lag <= bound, f"{group.group} of version {oldest} in step {step}, version {trained_at}, bound {bound}")
        for version in sorted(set(truth.made_by) - {m.NO_VERSION}):
            known = self.world.account.is_ancestor(truth.lineage, version, self)
            require(known, f"{group.group}: version {version} of {truth.lineage} never was in the timeline of {self.lineage}")

    # --- training ---

    def _train_if_loaded(self) -> None:
        if self.step in self.loaded and not self.is_training:
            self.is_training = True
            self.later(self.world.random.expovariate(1 / MEAN_STEP_S), self._trained)

    def _trained(self) -> None:
        step, interval = self.step, self.world.rules.publish_interval
        reply = self.batches[step]
        require(reply.version == self.version, f"step {step} trains version {self.version}, the broker says {reply.version}")
        self.trained[step] = tuple(g.group for g in reply.groups)
        self.world.account.trained(self, step)
        if (step + 1) // interval != step // interval:
            self.version += 1
            self._publish(self._save)
        else:
            self._save()

    def _save(self) -> None:
        if self.world.random.random() < CHECKPOINT_CHANCE:
            self.checkpoints = [*self.checkpoints, Checkpoint(self.step + 1, dict(self.trained))]
        commit = m.Commit(step=self.step, checkpoint=self.checkpoints[-1].step)
        self.ask(commit, lambda *_: self._committed())

    def _committed(self) -> None:
        self.world.trace(f"{self.name} has committed step {self.step}: {self.trained[self.step]}")
        self.world.progressed()
        del self.batches[self.step]
        self.loaded.discard(self.step)
        self.step += 1
        self.is_training = False
        self._next()

    def _finish(self) -> None:
        self.ask(m.Finish(), lambda *_: self._finished())

    def _finished(self) -> None:
        self.is_done = True
        self.world.progressed()
        self.leave()

    # --- refusals ---

    def refused(self, error: m.Error, request: Request) -> None:
        if isinstance(request.message, m.Goodbye) or (self.is_done and error.code == "not_joined"):  # a heartbeat behind the goodbye
            self.die()
        elif error.code == "source_ended":
            if isinstance(request.message, m.Batch) and request.message.step == self.step:
                self._finish()
            else:
                self.asked.discard(self.step + 1)
        else:
            expected = error.code in ("fenced", "not_joined") or (self.world.account.lost_suffix and error.code in TORN)
            require(expected, f"{self.name}: {error.code}: {error.text}")
            self.crash()


TORN = ("step", "not_resumed", "not_assigned", "lineage", "version")
"""What a trainer may be told by a broker that lost its last moments; it starts again from its checkpoint."""
