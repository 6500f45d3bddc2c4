"""Random runs: leases, slow puts, changes of every setting, pushes, restarts, rewinds, in any order. The same seed gives the same run.

Whatever happens: no batch holds a token staler than the bound in force when it was chosen; a batch asked for again is the same; the
version of a step is what the step before said it would be; no group is in two steps; and once things calm down, batches come. Every prompt
is in exactly one place: those of files, pushed ones and those of a stateful source.
"""

import math
import random
from collections import Counter
from typing import Any

import msgspec
import pytest
from made_samples import frames, made
from numbered_prompts import NumberedHook

from broker.source import HookSource
from slimebus.bus import messages as m

MAX_CALM_ROUNDS = 40
ETAS = [0, 1, 2, 4, math.inf]


class Run:
    """A trainer and one worker at a desk, and what must hold of every answer."""

    def __init__(self, desk: Any) -> None:
        self.desk = desk
        self.held: list[tuple[m.LeasedGroup, int]] = []
        self.chosen: dict[int, m.BatchReply] = {}
        self.promised: dict[int, int] = {0: 0}
        self.step = self.checkpoint = self.oldest = 0
        self.lineage, self.version = "L0", 0
        desk.begin(lineage=self.lineage)

    # --- what may happen ---

    def lease(self, number: int) -> None:
        """A worker that may lag behind asks for some groups."""
        serving = max(self.desk.state.meta.base_version, self.version - number % 3)
        for group in self.desk.lease(1 + number % 5, serving, lineage=self.lineage):
            self.held.append((group, serving))

    def put(self, number: int) -> None:
        """One of the leased groups is done; its last token is of the newest version."""
        if self.held:
            group, version = self.held.pop(number % len(self.held))
            runs = [(version, 2), (self.version, 2)]
            samples = [made(*runs, reward=float(number % 2)), *(made((-1, 2 + number % 7)) for _ in range(max(1, group.num_samples - 1)))]
            message = m.Put(group=group.group, lease=group.lease, lineage=self.lineage)
            bulk = frames(*samples, num_samples=group.num_samples)
            assert self.desk.ask("w", message, bulk=bulk).result in ("accepted", "discarded")

    def give_back(self, number: int) -> None:
        if self.held:
            group, _ = self.held.pop(number % len(self.held))
            outcome = ["requeue", "drop", "fail"][number % 3]
            self.desk.ask("w", m.GiveBack(group=group.group, lease=group.lease, outcome=outcome, reason="test"))

    def batch(self, number: int) -> None:
        """The trainer asks for the step it trains, or for the one ahead."""
        step = self.step + (number % 2 if self.step in self.chosen else 0)
        bound = self.desk.state.rules.max_staleness
        reply = self.desk.ask("t", m.Batch(step=step, wait_s=0.0))
        if isinstance(reply, m.BatchReply) and reply.groups:
            self.check(reply, bound)

    def check(self, reply: m.BatchReply, bound: float) -> None:
        known = self.chosen.setdefault(reply.step, reply)
        assert known.groups == reply.groups, "asked again, the batch was another"
        assert known.max_staleness == reply.max_staleness
        assert reply.version == self.promised[reply.step], "another version than the step before said"
        assert 0 <= reply.next_version - reply.version <= 1
        assert self.promised.setdefault(reply.step + 1, reply.next_version) == reply.next_version
        if known is reply:
            assert reply.max_staleness == (None if bound == math.inf else bound)
        for group in reply.groups:
            assert 0 <= reply.version - group.oldest_version <= (math.inf if reply.max_staleness is None else reply.max_staleness)
        names = [group.group for other in self.chosen.values() for group in other.groups]
        assert len(names) == len(set(names)), "a group is in two steps"

    def train(self, number: int) -> None:
        if self.step in self.chosen:
            self.version = self.chosen[self.step].next_version
            self.desk.publish(self.version, self.lineage)
            if number % 2:
                self.checkpoint = self.step + 1
                self.oldest = max(self.oldest, self.checkpoint - 2)
            assert self.desk.ask("t", m.Commit(step=self.step, checkpoint=self.oldest)) == m.Ok()
            self.step += 1

    def change(self, number: int) -> None:
        """One setting, or two that must fit together."""
        state, pick = self.desk.state, number // 8
        size, n = 1 + pick % 4, pick % 5
        wanted: list[dict[str, Any]] = [
            {"max_staleness": ETAS[n]},
            {"rollout_batch_size": size, "over_sampling_batch_size": 0},
            {"rollout_batch_size": size, "over_sampling_batch_size": size + n},
            {"update_weights_interval": 1 + pick % 3},
            {"on_stale": ["requeue", "drop"][pick % 2]},
            {"batch_tokens": [0, 10, 60][pick % 3]},
            {"n_samples_per_prompt": size},
            {"buffer_capacity": [0, 4, 9][pick % 3]},
        ]
        reply = self.desk.ask("op", m.Set(key=f"k{self.desk.request}", settings=wanted[number % 8]), run="")
        assert isinstance(reply, m.SetReply), reply
        assert reply.step == state.next_unassigned

    def restart(self, number: int) -> None:
        self.desk.restart()

    def rewind(self, number: int) -> None:
        """The trainer ends and begins again at a checkpoint that it keeps, at the version it had then."""
        step = max(self.oldest, self.checkpoint - number % 3)
        self.lineage = f"L{self.desk.request}"
        self.version = self.promised[step]
        self.desk.begin(step, self.version, self.lineage)
        self.step = self.checkpoint = step
        self.chosen = {s: reply for s, reply in self.chosen.items() if s < step}
        self.promised = {s: version for s, version in self.promised.items() if s <= step}
        self.held = []

    def wait(self, number: int) -> None:
        self.desk.ask("w", m.Heartbeat(lineage=self.lineage, serving=self.version, leases=[g.lease for g, _ in self.held]))
        self.desk.pass_time(float(number % 9))

    # --- counting ---

    def check_moves(self) -> None:
        """Of each state: what came in, less what went out, by the counts of moves alone, is what is there."""
        flow: Counter[str] = Counter()
        for name, count in self.desk.state.meta.moves.items():
            was, _, now = name.split(" ")[0].partition(">")
            flow[was] -= count
            flow[now] += count
        counts = {phase: self.desk.state.groups.count(phase) for phase in ("queued", "leased", "ready", "assigned", "committed")}
        assert {phase: flow[phase] for phase in counts} == counts
        assert -flow["source"] == self.desk.state.meta.cursor
        assert {phase: flow[phase] for phase in ("dropped", "dead") if flow[phase]} == self.desk.state.meta.ended

    # --- the end ---

    def calm_down(self) -> None:
        """A worker that is never late, and a trainer: a step is trained within a few rounds, twice."""
        for _ in range(2):
            aim = self.step + 1
            for _ in range(MAX_CALM_ROUNDS):
                while self.held:
                    self.put(1)
                self.held = [(g, self.version) for g in self.desk.lease(9, self.version, lineage=self.lineage)]
                self.batch(0)
                self.train(1)
                if self.step >= aim:
                    break
            assert self.step >= aim, self.desk.ask("t", m.Batch(step=self.step, wait_s=0.0))


OFTEN = [*[Run.lease] * 3, *[Run.put] * 6, *[Run.batch] * 4, *[Run.train] * 3]
OPERATIONS = [*OFTEN, Run.give_back, Run.change, Run.change, Run.restart, Run.rewind, Run.wait]


@pytest.mark.parametrize("seed", range(0, 240, 40))
def test_no_token_beyond_the_bound_whatever_happens(new_desk: Any, seed: int) -> None:
    for one in range(seed, seed + 40):
        chance = random.Random(one)
        run = Run(new_desk(prompts=10**6, max_attempts=50, samples_per_prompt=2))
        try:
            for _ in range(150):
                chance.choice(OPERATIONS)(run, chance.randrange(400))
                run.check_moves()
            run.calm_down()
        except AssertionError as broken:
            broken.add_note(f"seed {one}, step {run.step}, {run.desk.state.rules}")
            raise


class Life(Run):
    """A run with prompts that come once, and that may begin anew. freed: prompts that a checkpoint covers."""

    def __init__(self, desk: Any, *, is_hooked: bool) -> None:
        self.is_hooked, self.pushed, self.freed = is_hooked, 0, set[str]()
        self.desk = desk
        self.restart(0)
        desk.epochs.clear()
        super().__init__(desk)

    def restart(self, number: int) -> None:
        if self.is_hooked:
            self.desk.source = HookSource("h", NumberedHook())
            self.desk.source.record_of = lambda name: self.desk.store.get("prompts", name)
        self.desk.restart()
        self.desk.epochs.pop("c", None)

    def push(self, number: int) -> None:
        if "c" not in self.desk.epochs:
            self.desk.join("c", "client")
        bulk = [msgspec.msgpack.encode({"prompt": f"p{self.pushed + i}"}) for i in range(1 + number % 3)]
        for _ in range(1 + number % 2):
            answer = self.desk.ask("c", m.Push(key=f"k{self.pushed}", front=bool(self.pushed % 2)), bulk=bulk)
            assert isinstance(answer, m.PushReply), answer
        self.pushed += len(bulk)

    def train(self, number: int) -> None:
        kept = set(self.desk.state.groups.by_id)
        super().train(number)
        self.freed |= kept - set(self.desk.state.groups.by_id)

    def go_on(self, number: int) -> None:
        for act in (self.lease, self.put, self.put, self.batch, self.train):
            act(number)

    def expire(self, number: int) -> None:
        self.desk.pass_time(11.0)
        self.desk.epochs.pop("c", None)  # a client that is silent is forgotten

    def rewind(self, number: int) -> None:
        """Also anew from the start: what was freed comes again where a source gives it again."""
        if number % 3 == 0:
            if self.oldest:
                self.freed = {name for name in self.freed if self.is_hooked or not name.startswith("0/")}
            self.checkpoint = self.oldest = 0
        super().rewind(number)

    def check_prompts(self) -> None:
        state, store = self.desk.state, self.desk.store
        live = set(state.groups.by_id)
        ended = {key for key, _ in store.scan("ended")}
        self.freed -= live | ended
        waiting = {f"{lane}/{number}" for lane, (first, end) in state.meta.pushed.items() for number in range(first, end)}
        drawn = {f"{'hook' if self.is_hooked else '0'}/{number}" for number in range(state.meta.cursor)}
        born = drawn | {f"{lane}/{number}" for lane, (_, end) in state.meta.pushed.items() for number in range(end)}
        assert live | ended | self.freed | waiting == born
        assert len(live) + len(ended) + len(self.freed) + len(waiting) == len(born), "a prompt is in two places"
        assert sum(end for _, end in state.meta.pushed.values()) == self.pushed
        records = {key for key, _ in store.scan("prompts")}
        assert live | waiting <= records
        if self.is_hooked:
            self._check_told(ended)

    def _check_told(self, ended: set[str]) -> None:
        hook = msgspec.msgpack.decode(self.desk.store.get("source", "state"))
        assert hook["given"] == self.desk.state.meta.cursor
        trained = [tuple(told[:2]) for told in hook["told"] if told[2] == "trained"]
        assert len(trained) == len(set(trained))
        gone = [told[0] for told in hook["told"] if told[2] in ("dropped", "dead")]
        assert sorted(gone) == sorted(name for name in ended if name.startswith("hook/"))
        committed = {name for record in self.desk.state.steps.values() if record.is_committed for name in record.groups}
        assert {name for name in committed if name.startswith("hook/")} <= {name for name, _ in trained}


LIFE = [*(operation.__name__ for operation in OPERATIONS), *["go_on"] * 8, "push", "push", "expire", "rewind"]


@pytest.mark.parametrize("is_hooked", [False, True], ids=["files", "hook"])
@pytest.mark.parametrize("seed", range(16))
def test_every_prompt_is_in_exactly_one_place(new_desk: Any, seed: int, is_hooked: bool) -> None:
    chance = random.Random(seed)
    desk = new_desk(prompts=10_000, max_staleness=seed % 3, max_attempts=2, on_stale=("requeue", "drop")[seed % 2], batch_size=1 + seed % 2)
    life = Life(desk, is_hooked=is_hooked)
    for _ in range(200):
        getattr(life, chance.choice(LIFE))(chance.randrange(400))
        life.check_prompts()
    assert sum(count for move, count in desk.state.meta.moves.items() if move.startswith("source>")) > 10
