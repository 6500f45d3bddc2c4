"""Whatever happens, every prompt is in exactly one place: those of files, pushed ones and those of a stateful source."""

import random
from typing import Any

import msgspec
import pytest
from numbered_prompts import NumberedHook

from broker.source import HookSource
from slimebus.bus import messages as m


class Life:
    """A run at a desk in which anything may happen."""

    def __init__(self, desk: Any, seed: int, *, is_hooked: bool) -> None:
        self.desk, self.random, self.is_hooked = desk, random.Random(seed), is_hooked
        self.pushed, self.step, self.version, self.lineage, self.checkpoint = 0, 0, 0, "L0", 0
        self.freed: set[str] = set()
        self.boot()
        desk.epochs.clear()
        desk.begin(lineage=self.lineage)

    def boot(self) -> None:
        if self.is_hooked:
            self.desk.source = HookSource("h", NumberedHook())
            self.desk.source.record_of = lambda name: self.desk.store.get("prompts", name)
        self.desk.restart()
        self.desk.epochs.pop("c", None)

    def act(self) -> None:
        getattr(self, self.random.choice(["push", "work", "work", "work", "train", "train", "restart", "rewind", "expire"]))()
        self.check()

    def push(self) -> None:
        if "c" not in self.desk.epochs:
            self.desk.join("c", "client")
        texts = [f"p{self.pushed + i}" for i in range(self.random.randint(1, 3))]
        bulk = [msgspec.msgpack.encode({"prompt": text}) for text in texts]
        for _ in range(self.random.randint(1, 2)):
            answer = self.desk.ask("c", m.Push(key=f"k{self.pushed}", front=bool(self.pushed % 2)), bulk=bulk)
            assert isinstance(answer, m.PushReply), answer
        self.pushed += len(texts)

    def work(self) -> None:
        for group in self.desk.lease(self.random.randint(1, 3), self.version, lineage=self.lineage):
            fate = self.random.choice(["put", "put", "put", "fail", "drop", "requeue", "hold"])
            if fate == "put":
                self.desk.put(group, self.version, lineage=self.lineage, rewards=(self.random.choice([1.0, None]), 0.0))
            elif fate != "hold":
                self.desk.ask("w", m.GiveBack(group=group.group, lease=group.lease, outcome=fate, reason="luck"))

    def train(self) -> None:
        if not self.desk.batch(self.step):
            return
        self.checkpoint = self.step + 1 if self.random.random() < 0.5 else self.checkpoint
        self.desk.publish(self.version + 1, self.lineage)
        kept = set(self.desk.state.groups.by_id)
        assert self.desk.ask("t", m.Commit(step=self.step, checkpoint=self.checkpoint)) == m.Ok()
        self.freed |= kept - set(self.desk.state.groups.by_id)
        self.step, self.version = self.step + 1, self.version + 1

    def restart(self) -> None:
        self.boot()

    def expire(self) -> None:
        self.desk.pass_time(11.0)
        self.desk.epochs.pop("c", None)  # a client that is silent is forgotten

    def rewind(self) -> None:
        """To the checkpoint, or anew from the start: what was freed comes again where a source gives it again."""
        self.step = self.version = self.random.choice([0, self.checkpoint, self.checkpoint])
        if self.step < self.checkpoint:
            self.checkpoint = 0
            self.freed = {name for name in self.freed if self.is_hooked or not name.startswith("0/")}
        self.lineage = f"L{int(self.lineage[1:]) + 1}"
        assert self.desk.ask("t", m.Resume(step=self.step, version=self.version, lineage=self.lineage)) == m.Ok()
        self.desk.publish(self.version, self.lineage)

    def check(self) -> None:
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


@pytest.mark.parametrize("is_hooked", [False, True], ids=["files", "hook"])
@pytest.mark.parametrize("seed", range(16))
def test_every_prompt_is_in_exactly_one_place(new_desk: Any, seed: int, is_hooked: bool) -> None:
    desk = new_desk(prompts=10_000, max_staleness=seed % 3, max_attempts=2, on_stale=("requeue", "drop")[seed % 2], batch_size=1 + seed % 2)
    life = Life(desk, seed, is_hooked=is_hooked)
    for _ in range(120):
        life.act()
    assert life.desk.state.meta.cursor + life.pushed > 10
