"""The hard bound, over random runs: leases, slow puts, changes of every setting, restarts, rewinds, in any order.

Whatever happens: no batch holds a token staler than the bound in force when it was chosen; a batch asked for again is the same; the
version of a step is what the step before said it would be; no group is in two steps; and once things calm down, batches come. The
same seed gives the same run.
"""

import math
import random
from collections import Counter
from typing import Any

import pytest
from made_samples import frames, made

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
