"""A simulated trainer: step after step as trainer/loop.py does it, with one batch asked ahead; keeps its own account.

It checks what it is handed by itself: age, timeline, repetition. Nothing here asks the state machine what is right.
"""

from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
from simulation.actor import TIMEOUT_RESENDS, Actor, Request, require
from simulation.worker import Truth

from broker.simulate.timeline import Act
from slimebus.bus import messages as m

if TYPE_CHECKING:
    from simulation.world import World

MEAN_STEP_S = 0.5
CHECKPOINT_CHANCE = 0.4
SERVE_LAST_S = 1.0
"""After its last step a trainer serves weights for so long; who has not pulled the last version by then never will."""
KEPT_CHECKPOINTS = 3
REJECT_CHANCE = 0.05

Steps = dict[int, tuple[str, ...]]
"""The groups trained in each step of a timeline."""


class Account:
    """What was trained, kept beside the broker's account and never read from it: whose timeline survives, and which promises a power cut
    has released it from."""

    def __init__(self) -> None:
        self.lost_suffix = False
        self.may_repeat: set[str] = set()
        self.finished_steps: int | None = None
        """How many steps a trainer had trained when it said that it has finished; the most that any did."""
        self._weights: dict[tuple[str, int], Steps] = {}

    def tore_off(self, changed: set[tuple[str, str]]) -> None:
        """The last transactions are gone after their answers were sent: these groups may be trained again."""
        self.lost_suffix = True
        self.may_repeat |= {key for table, key in changed if table == "groups"}

    def published(self, trainer: "Trainer") -> None:
        """These weights are what the steps trained so far made of the model. A version told again, steps later, is still the same."""
        self._weights.setdefault((trainer.lineage, trainer.version), dict(trainer.trained))

    def finished(self, trainer: "Trainer") -> None:
        """This trainer has no step left to train."""
        self.finished_steps = max(self.finished_steps or 0, trainer.step)

    def is_ancestor(self, lineage: str, version: int, trainer: "Trainer") -> bool:
        """True when those weights are what this trainer's timeline has, or had on its way."""
        weights = self._weights.get((lineage, version))
        return weights is not None and all(trainer.trained.get(step) == groups for step, groups in weights.items())

    def trained(self, trainer: "Trainer", step: int) -> None:
        """A step is trained. Raises Broken when a group of it was trained before in the same timeline."""
        groups = trainer.trained[step]
        earlier = {group for s, names in trainer.trained.items() if s != step for group in names}
        repeated = sorted((earlier & set(groups)) - self.may_repeat)
        require(not repeated, f"{repeated} trained a second time, in step {step} of {trainer.lineage}")
        twice = [group for group, count in Counter(groups).items() if count > 1]
        require(not twice, f"{twice} more than once in step {step}")


class Checkpoint(msgspec.Struct, frozen=True):
    """What a trainer can go on from: the step to train next, what was trained before, and the lineage that saved it."""

    step: int = 0
    trained: Steps = {}
    lineage: str = ""


class Trainer(Actor):
    """One trainer process, begun from the newest of the run's checkpoints. `trained` is what its timeline has trained."""

    role = "trainer"

    def __init__(self, world: "World", name: str, *, take_over: bool = False) -> None:
        self.start = start = world.checkpoints[-1]
        self.step, self.trained, self.parent = start.step, dict(start.trained), start.lineage
        self.version = world.version_of(start.step)
        self.lineage = f"{name}-{world.timeline.serial()}"
        self.batches: dict[int, m.BatchReply] = {}
        self.fetches: dict[int, m.Fetch] = {}
        self.loaded: set[int] = set()
        self.asked: set[int] = set()
        self.announced = m.NO_VERSION
        self.rejected: list[int] = []
        self.num_rejecting = 0
        self.before_saving = m.Heartbeat()
        self.is_training = self.is_done = self.has_resumed = False
        super().__init__(world, name, take_over=take_over)

    def crash(self) -> None:
        """kill -9; it starts again from the newest checkpoint."""
        self.die()
        self.world.timeline.later(self.world.random.expovariate(0.5), self._start_again)

    def _start_again(self) -> None:
        if self.world.trainer is self:
            self.world.trainer = Trainer(self.world, self.name)

    def _turned_away(self) -> None:
        """Another trainer lives, and the run counts on it; where it is dead by now, this one is restarted."""
        self.die()
        living = [p for p in self.world.processes.values() if isinstance(p, Trainer) and p.epoch]
        if self.world.trainer is self and living:
            self.world.trainer = max(living, key=lambda p: p.epoch)
        self.world.timeline.later(self.world.random.expovariate(0.5), self._start_again)

    # --- timeline ---

    def begin(self, welcome: m.Welcome) -> None:
        self.world.trainer = self
        if not self._has_newest():
            self.crash()
            return
        resume = m.Resume(step=self.step, version=self.version, lineage=self.lineage, parent=self.parent)
        self.ask(resume, lambda *_: self._resumed())

    def _has_newest(self) -> bool:
        """False when another trainer has saved since this one has loaded its checkpoint."""
        return self.world.checkpoints[-1] is self.start

    def _resumed(self) -> None:
        if not self._has_newest():
            self.crash()
            return
        self.has_resumed = True
        self.world.trace(f"{self.name} is resumed at step {self.step}, version {self.version}, lineage {self.lineage}")
        self._publish(self._next)

    def _publish(self, then: Act) -> None:
        self.world.account.published(self)
        version = self.version

        def published(*_: Any) -> None:
            self.announced = version
            then()

        self.ask(m.Publish(lineage=self.lineage, version=version, publishers=["tcp://x:1"], digest="d"), published)

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
            if self._has_steps(step) and step not in self.asked and not self.num_rejecting:
                self.asked.add(step)
                self._ask_batch(step)
        self._train_if_loaded()

    def _choice(self, step: int) -> int:
        """How often the batch of a step was chosen anew: a group of it, or of a step before it, was handed back."""
        return sum(rejected <= step for rejected in self.rejected)

    def _ask_batch(self, step: int) -> None:
        ask, choice = m.Batch(step=step, wait_s=self.world.scenario.wait_s, trained=self.step), self._choice(step)
        self.ask(ask, lambda reply, _: self._got_batch(step, reply) if choice == self._choice(step) else None)

    def _got_batch(self, step: int, reply: m.BatchReply) -> None:
        if not reply.groups:
            self._ask_batch(step)
            return
        self.batches[step], choice = reply, self._choice(step)
        self.fetches[step] = ask = m.Fetch(groups=[g.group for g in reply.groups])
        self.ask(ask, lambda answer, bulk: self._fetched(step, answer, bulk) if choice == self._choice(step) else None)

    def _reject(self, step: int) -> None:
        """A group of the batch cannot be trained: what was fetched of this step and of later ones is forgotten."""
        self.rejected.append(step)
        bad = self.world.random.choice(self.batches[step].groups).group
        self.loaded = {s for s in self.loaded if s < step}
        self.batches = {s: batch for s, batch in self.batches.items() if s < step}
        self.fetches = {s: fetch for s, fetch in self.fetches.items() if s < step}
        self.num_rejecting += 1
        self.ask(m.Reject(step=step, groups={bad: "luck"}), lambda *_: self._rejected(step))

    def _rejected(self, step: int) -> None:
        self.num_rejecting -= 1
        self.asked = {s for s in self.asked if s < step}
        self._next()

    def _fetched(self, step: int, reply: m.FetchReply, bulk: list[Any]) -> None:
        groups, start = self.batches[step].groups, 0
        require(len(reply.num_frames) == len(groups), f"{len(reply.num_frames)} payloads for {len(groups)} groups")
        for group, count in zip(groups, reply.num_frames, strict=True):
            self._check_payload(step, group, bulk[start : start + count])
            start += count
        if not self.world.is_calm and self.world.random.random() < REJECT_CHANCE:
            self._reject(step)
            return
        self.loaded.add(step)
        self._train_if_loaded()

    def _check_payload(self, step: int, group: m.BatchGroup, frames: list[Any]) -> None:
        """The group is what was asked for, fresh enough for its step and of this timeline, by what its makers say."""
        truth = msgspec.msgpack.decode(frames[-1], type=Truth)
        require(truth.group == group.group, f"asked for {group.group}, got {truth.group}")
        require(len(truth.trained) == group.num_samples, f"{group.group}: {group.num_samples} samples, {len(truth.trained)} are good")
        versions = [v for trained in truth.trained for v in trained if v != m.NO_VERSION]
        oldest = min(versions, default=m.NO_VERSION)
        require(oldest == group.oldest_version, f"{group.group} is of version {oldest}, the broker says {group.oldest_version}")
        trained_at = self.world.version_of(step)
        bound = self.world.bound_of(self.batches[step])
        lag = trained_at - oldest if versions else 0
        require(0 <= lag <= bound, f"{group.group} of version {oldest} in step {step}, version {trained_at}, bound {bound}")
        for lineage, version in {*truth.earlier, *((truth.lineage, version) for version in truth.made_by if version != m.NO_VERSION)}:
            known = self.world.account.is_ancestor(lineage, version, self)
            require(known, f"{group.group}: version {version} of {lineage} never was in the timeline of {self.lineage}")

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
        """A checkpoint becomes the newest once the broker says that no other trainer has taken over."""
        if self.world.random.random() < CHECKPOINT_CHANCE:
            self.before_saving = self.beat()
            self.ask(self.before_saving, lambda *_: self._saved(), timeout_s=TIMEOUT_RESENDS * self.world.scenario.resend_s)
        else:
            self._commit()

    def _saved(self) -> None:
        newest = Checkpoint(self.step + 1, dict(self.trained), self.lineage)
        self.world.checkpoints = [*self.world.checkpoints, newest][-KEPT_CHECKPOINTS:]
        self._commit()

    def _commit(self) -> None:
        commit = m.Commit(step=self.step, checkpoint=self.world.oldest_checkpoint)
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
        self.world.account.finished(self)
        self.ask(m.Finish(), lambda *_: self._finished())

    def _finished(self) -> None:
        self.is_done = True
        self.world.progressed()
        self.later(SERVE_LAST_S * self.world.scenario.slowness, self._leave)

    def _leave(self) -> None:
        self.leave()
        if self.world.scenario.more_steps and self.world.trainer is self:
            self.world.extend()

    # --- refusals ---

    def unreachable(self, request: Request) -> None:
        """Without an answer before it saves, a trainer does not know whether another one has its place: it ends."""
        if request.message is self.before_saving:
            self.crash()
        else:
            super().unreachable(request)

    def _was_chosen_anew(self, message: m.Message) -> bool:
        """The fetch was sent before its batch, or one before it, was rejected."""
        return isinstance(message, m.Fetch) and not any(message is fetch for fetch in self.fetches.values())

    def refused(self, error: m.Error, request: Request) -> None:
        if isinstance(request.message, m.Goodbye) or (self.is_done and error.code == "not_joined"):  # a heartbeat behind the goodbye
            self.die()
        elif error.code == "name_in_use":
            self._turned_away()
        elif error.code == "not_assigned" and self._was_chosen_anew(request.message):
            pass
        elif error.code == "step" and isinstance(request.message, m.Batch) and request.message.step in self.trained:
            pass  # the same, and that step is trained since; the answer to its commit may be under way
        elif error.code == "step" and isinstance(request.message, m.Resume) and self.step < self.world.oldest_checkpoint:
            self.crash()  # another trainer went on while this one was on its way
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
