"""A simulated rollout worker: leases groups, takes a while over each with whatever versions it has, puts them."""

from typing import TYPE_CHECKING, Any

import msgspec
from simulation.actor import Actor, Request, require
from simulation.rude import spoiled
from simulation.scenario import WorkerPlan

from slimebus.bus import messages as m
from slimebus.bus.sample_table import TOKEN_FIELDS, SampleTable, encode_table

if TYPE_CHECKING:
    from simulation.world import World

MEAN_PULL_S = 0.3
RUDE_SHARE = 0.4
"""Of the puts of a rude worker, those with something wrong."""
LEAVE_S = 5.0


class Truth(msgspec.Struct, array_like=True):
    """What really made a group's samples; travels as an opaque frame, so only the trainer reads it.

    trained: for each good sample the versions of its trainable tokens; made_by: every version in it; earlier: lineage and version of
    those that made the partial it goes on from.
    """

    group: str
    lineage: str
    trained: list[list[int]]
    made_by: list[int]
    earlier: list[tuple[str, int]] = []


class Worker(Actor):
    """One worker process. `serving` is the version that it has pulled."""

    role = "rollout"

    def __init__(self, world: "World", name: str, plan: WorkerPlan, *, take_over: bool = False) -> None:
        self.plan, self.lineage, self.serving = plan, "", m.NO_VERSION
        self.held: dict[int, m.LeasedGroup] = {}
        self.begun: dict[int, tuple[str, int, list[tuple[str, int]]]] = {}
        """Of what is being made: lineage and version that it was begun with, and who made the partial before it."""
        self.putting: set[int] = set()
        self.is_leasing = self.is_leaving = self.lists_leases = False
        self._wanted = ("", m.NO_VERSION)
        super().__init__(world, name, take_over=take_over)

    def crash(self) -> None:
        """kill -9; whoever looks after it starts it again, sooner or later."""
        if self.is_dead:
            return
        self.die()
        self.world.timeline.later(self.world.random.expovariate(0.5), self.start_again)

    def start_again(self) -> None:
        """Another process of this name takes its place."""
        if self.world.counts_on(self):
            self.world.replace_worker(self, Worker(self.world, self.name, self.plan))

    def preempt(self) -> None:
        """SIGTERM: give everything back and leave within a deadline."""
        if self.is_leaving or self.is_dead:
            return
        self.is_leaving = True
        for group in list(self.held.values()):
            if group.lease not in self.putting:
                self.ask(m.GiveBack(group=group.group, lease=group.lease, outcome="requeue", reason="worker left"), lambda *_: None)
        self._leave_by(self.world.now + LEAVE_S)

    def _leave_by(self, deadline: float) -> None:
        """Say goodbye once what is being put is answered, or the deadline has come."""
        if self.putting and self.world.now < deadline:
            self.later(0.2, lambda: self._leave_by(deadline))
        else:
            self.leave()

    def _finished(self) -> None:
        """Leave; should the trainer go back behind its end, whoever looks after the run starts workers again."""
        if not self.is_leaving:
            self._look_after_the_run()
            self.preempt()

    def _look_after_the_run(self) -> None:
        again = self._look_after_the_run if self.world.trainer.is_done else self.start_again
        self.world.timeline.later(10.0 * self.world.scenario.slowness, again)

    # --- weights ---

    def beat(self) -> m.Heartbeat:
        leases, lists = list(self.held), self.lists_leases
        self.lists_leases = False
        return m.Heartbeat(
            state="serving",
            lineage=self.lineage,
            serving=self.serving,
            num_leases=len(leases),
            lease_sum=sum(leases) % m.LEASE_SUM_MODULUS,
            leases=leases if lists else None,
        )

    def beaten(self, reply: m.HeartbeatReply) -> None:
        if reply.list_leases:
            self.lists_leases = True
            self.beat_now()
        for lease in [*reply.lost, *reply.surplus]:
            if lease not in self.putting:
                self._release(lease)
        for lease in reply.recalled:
            if lease in self.held and lease not in self.putting and not self.plan.is_rude:
                self._hand_back(self.held[lease])
        self._news(reply.lineage, reply.version)
        if reply.finished:
            self._finished()

    def told(self, hint: m.Hint) -> None:
        self._news(hint.lineage, hint.version)
        if hint.recalls and self.epoch and not self.is_leaving:
            self.beat_now()
        if hint.finished and self.epoch:
            self._finished()

    def _news(self, lineage: str, version: int) -> None:
        """Pull what is newer; an old answer that comes late is not."""
        newest, known = self._wanted
        if version == m.NO_VERSION or (lineage == newest and version <= known):
            return
        self._wanted = (lineage, version)
        self.later(self.world.random.expovariate(1 / MEAN_PULL_S), lambda: self._pulled(lineage, version))

    def _pulled(self, lineage: str, version: int) -> None:
        if self._wanted == (lineage, version) and self.world.can_pull(version):
            self.lineage, self.serving = lineage, version

    # --- groups ---

    def begin(self, welcome: m.Welcome) -> None:
        self.world.joined(self)
        self._news(welcome.lineage, welcome.version)
        self._lease()

    def _lease(self) -> None:
        want = self.plan.capacity - len(self.held)
        if self.is_leasing or self.is_leaving or want < 1:
            return
        self.is_leasing = True
        needs_weights = self.world.scenario.needs_weights
        lineage, serving = (self.lineage, self.serving) if needs_weights else ("", m.NO_VERSION)
        wait_s = self.world.scenario.wait_s
        ask = m.Lease(want=want, wait_s=wait_s, lineage=lineage, serving=serving, needs_weights=needs_weights, takes_partials=needs_weights)
        self.ask(ask, self._leased)

    def _leased(self, reply: m.LeaseReply, bulk: list[Any]) -> None:
        self.is_leasing = False
        at = len(reply.groups)
        for group in reply.groups:
            frames = bulk[at : at + group.partial_frames]
            at += group.partial_frames
            truth = msgspec.msgpack.decode(frames[-1], type=Truth) if frames else Truth(group.group, "", [], [])
            require(truth.group == group.group, f"the partial of {truth.group} came with {group.group}")
            self.held[group.lease] = group
            self._start(group, [*truth.earlier, *((truth.lineage, version) for version in sorted(set(truth.made_by)))])
        require(len(bulk) == at, f"{len(bulk)} frames for {len(reply.groups)} leased groups and their partials")
        self.later(0.0 if reply.groups else 0.1, self._lease)

    def _start(self, group: m.LeasedGroup, earlier: list[tuple[str, int]]) -> None:
        rng, lineage, version = self.world.random, self.lineage, self.serving
        if not self.world.scenario.needs_weights:
            lineage, version = "", m.NO_VERSION  # demonstrations: no policy makes them
        self.begun[group.lease] = (lineage, version, earlier)
        seconds = rng.expovariate(1 / self.plan.mean_s)
        if self.world.is_poison(group.group) and group.kind == "train":
            self.later(seconds, self.crash)
        else:
            self.later(seconds, lambda: self._finish(group, lineage, version))

    def _finish(self, group: m.LeasedGroup, lineage: str, version: int) -> None:
        if group.lease not in self.held or self.is_leaving:
            return
        rng = self.world.random
        luck = 1.0 if self.world.is_calm else rng.random()
        if luck < 0.1:
            outcome = rng.choice(["requeue", "drop", "fail"])
            back = m.GiveBack(group=group.group, lease=group.lease, outcome=outcome, reason="luck")
            self.ask(back, lambda *_: self._release(group.lease))
        else:
            self._put(group, lineage, version, failed=luck < 0.2)

    def _hand_back(self, group: m.LeasedGroup) -> None:
        """A recalled group goes back with what there is of it."""
        self.putting.add(group.lease)
        lineage, version, _ = self.begun[group.lease]
        back = m.GiveBack(group=group.group, lease=group.lease, outcome="partial", reason="recalled", lineage=lineage)
        self.world.faults["recall"] += 1
        self.ask(back, lambda *_: self._release(group.lease), self._make(group, lineage, version, failed=False, is_cut=True))

    def _put(self, group: m.LeasedGroup, lineage: str, version: int, *, failed: bool) -> None:
        put = m.Put(group=group.group, lease=group.lease, lineage=lineage)
        frames, wrong = self._make(group, lineage, version, failed=failed), ""
        if self.plan.is_rude and self.world.random.random() < RUDE_SHARE and not self.world.is_calm:
            wrong, put, frames = spoiled(self.world.random, put, frames, has_lineage=bool(lineage))
            self.world.trace(f"{self.name} puts {group.group} with {wrong}")

        def done(reply: m.PutReply, _: list[Any]) -> None:
            require(not wrong or reply.result != "accepted", f"a put of {group.group} with {wrong} was accepted")
            if group.kind == "eval" and reply.result == "accepted" and self.world.trainer.is_done:
                self.world.progressed()
            self._release(group.lease)

        self.putting.add(group.lease)
        self.ask(put, done, frames)

    def _make(self, group: m.LeasedGroup, lineage: str, version: int, *, failed: bool, is_cut: bool = False) -> list[bytes]:
        """Samples begun with `version`, behind those of a partial; a newer version of that lineage may have come in the middle."""
        rng, newest = self.world.random, self.serving if lineage and self.lineage == lineage else version
        table = SampleTable(num_tokens=[], versions=[], fields=[m.Field(name=name, dtype=dtype) for name, dtype in TOKEN_FIELDS.items()])
        mask, earlier = b"", self.begun[group.lease][2]
        before = [] if self.world.rules.masks_offpolicy else [v for _, v in earlier]
        truth = Truth(group.group, lineage, [], [], earlier)
        for i in range(group.num_samples):
            made_by = [version, newest] if version != newest and rng.random() < 0.7 else [version]
            trained = made_by[-1:] if rng.random() < 0.2 else made_by  # the loss mask may leave out what the older version made
            good = is_cut or (not failed and (i == 0 or self.world.is_calm or rng.random() < 0.9))
            table.num_tokens.append(2 + 2 * len(earlier) + 2 * len(made_by))
            table.versions.append([(m.NO_VERSION, 2), *((v, 2) for _, v in earlier), *((v, 2) for v in made_by)])
            table.reward = [*table.reward, 1.0 if good and not is_cut else None]
            table.status = [*table.status, "aborted" if is_cut else "completed" if good else "failed"]
            mask += bytes([0] * 2 + [1 if before else 0] * 2 * len(earlier))
            mask += bytes([0] * 2 * (len(made_by) - len(trained)) + [1] * 2 * len(trained))
            if good:
                truth.made_by += made_by
                truth.trained.append([*before, *trained])
        frame = msgspec.msgpack.encode(truth)
        table.fields.append(m.Field(name="truth", dtype="uint8", shapes=[[len(frame)]] + [[0]] * (group.num_samples - 1)))
        total = sum(table.num_tokens)
        return [encode_table(table), bytes(4 * total), mask, bytes(4 * total), frame]

    def _release(self, lease: int) -> None:
        self.putting.discard(lease)
        self.begun.pop(lease, None)
        if self.held.pop(lease, None) is not None:
            self._lease()

    # --- refusals ---

    def refused(self, error: m.Error, request: Request) -> None:
        if isinstance(request.message, m.Put) and error.code == "bad_samples" and (self.world.account.lost_suffix or self.plan.is_rude):
            self._release(request.message.lease)  # spoiled, or made by a version whose publish was torn off
            return
        require(error.code in ("fenced", "not_joined", "name_in_use"), f"{self.name}: {error.code}: {error.text}")
        if isinstance(request.message, m.Goodbye):
            self.die()
        elif error.code == "not_joined" and self.plan.rejoins and not self.is_leaving:
            self._rejoin(request)
        elif not self.is_leaving:
            self.crash()

    def _rejoin(self, request: Request) -> None:
        if self.epoch:
            self.hello()
        if not isinstance(request.message, m.Heartbeat):
            self.later(1.0, lambda: self.ask(request.message, request.done, request.bulk))
