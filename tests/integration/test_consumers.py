"""Consumers of a live broker: the example of the document, a critic behind it, kill -9 of both sides."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from answering import Answering, polite
from live_broker import LiveBroker
from scripted import begin, make, train
from slimebus_command import ROOT

from slimebus.bus.errors import SlimebusError
from slimebus.bus.messages import Commit, Finish, Goodbye, Heartbeat, HeartbeatReply, Message, Read
from slimebus.bus.transport.server import Request
from slimebus.client.consumer import Consumer
from slimebus.process.launch import free_port

pytestmark = pytest.mark.integration

BATCH = 2


class Bench(LiveBroker):
    """A broker that holds groups until they have `teacher_logprobs`, a trainer and a worker at hand."""

    def __init__(self, folder: Path) -> None:
        broker = {"heartbeat_s": 0.3, "max_staleness": 4, "required_fields": ["teacher_logprobs"]}
        super().__init__(folder, broker=broker, rollout={"rollout_batch_size": BATCH, "n_samples_per_prompt": 2, "num_rollout": 20})
        self.trainer, self.worker = self.client("t", "trainer"), self.client("w", "rollout")
        begin(self.trainer)

    def make(self, count: int, version: int) -> list[str]:
        return make(self.worker, count, version=version)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path) as found:
        yield found


def example(folder: Path) -> str:
    """The program of docs/consumers.md."""
    code = re.search(r"<!-- run: teacher -->\n```python\n(.*?)```", (ROOT / "docs" / "consumers.md").read_text(), re.DOTALL)
    assert code
    (folder / "teacher.py").write_text(code[1])
    return str(folder / "teacher.py")


def test_the_teacher_of_the_document_gives_every_trained_sample_its_field(bench: Bench, tmp_path: Path) -> None:
    teacher = bench.start_beside(example(tmp_path), bench.address)
    for step in range(4):
        bench.make(BATCH, step)
        for samples in train(bench.trainer, step).values():
            for one in samples:
                assert one.extras["teacher_logprobs"].tolist() == [-0.5] * len(one.tokens)
        if step == 1:  # it goes on where it was
            teacher.kill()
            teacher.wait(10)
            teacher = bench.start_beside(example(tmp_path), bench.address)
        if step == 2:
            bench.kill()
            bench.start()
    bench.trainer.call(Finish())
    bench.worker.call(Goodbye())
    assert teacher.wait(30) == 0
    bench.trainer.call(Goodbye())
    assert bench.process.wait(30) == 0


def test_a_critic_stands_behind_a_teacher(bench: Bench) -> None:
    with Consumer(bench.address, name="teacher") as teacher, Consumer(bench.address, name="critic") as critic:
        made = bench.make(BATCH, 0)
        assert critic.read(needs=["teacher_logprobs"], wait_s=0) == []
        read = teacher.read(wait_s=20)
        while len(read) < BATCH:
            read += teacher.read(wait_s=20)
        assert [g.id for g in read] == made
        for group in read:
            logprobs = [np.full(len(s.tokens), -1.0, np.float32) for s in group.samples]
            assert teacher.put_fields(group, {"teacher_logprobs": logprobs})
            assert teacher.put_fields(group, {"teacher_logprobs": logprobs}), "a repeat"
        behind = critic.read(needs=["teacher_logprobs"], wait_s=20)
        for group in behind:
            assert group.samples[0].extras["teacher_logprobs"][0] == -1.0
            critic.put_fields(
                group, {"values": [np.zeros(len(s.tokens), np.float32) for s in group.samples], "baseline": [np.float32(1)] * 2}
            )
            with pytest.raises(SlimebusError, match="from consumer teacher") as refused:
                critic.put_fields(group, {"teacher_logprobs": [np.zeros(len(s.tokens), np.float32) for s in group.samples]})
            assert refused.value.code == "field_exists"
        assert critic.read(extras=["values"], wait_s=0) == []
        trained = train(bench.trainer, 0)
        assert sorted(trained) == sorted(made)
        assert sorted(trained[made[0]][0].extras) == ["baseline", "teacher_logprobs", "values"]
        bench.trainer.call(Commit(step=0, checkpoint=1))
        assert not teacher.put_fields(read[0], {"more": [np.zeros(1, np.int8)] * 2})


def test_a_consumer_goes_back_to_where_its_own_checkpoint_ends(bench: Bench) -> None:
    with Consumer(bench.address, name="critic") as critic:
        made = bench.make(2 * BATCH, 0)
        first = critic.read(2, wait_s=20)
        critic.read(wait_s=20)
        assert critic.read(wait_s=0) == []
    with Consumer(bench.address, name="critic") as critic:
        assert critic.read(wait_s=0) == [], "all is acknowledged"
        critic.rewind(first[-1].position)
        again = critic.read(wait_s=20)
        assert [group.id for group in again] == made[2:]
        assert critic.position == again[-1].position
        values = [(group, {"values": [np.zeros(len(s.tokens), np.float32) for s in group.samples]}) for group in again]
        assert critic.put_all(values) == [True, True]
        assert critic.read(wait_s=0) == [], "it goes back once"


def test_a_consumer_in_the_middle_of_its_work_ends_soon_after_the_broker(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slimebus.client.consumer.LAST_ANSWER_S", 0.2)
    with Consumer(bench.address, name="critic") as critic:
        bench.make(1, 0)
        (group,) = critic.read(wait_s=20)
        bench.trainer.call(Finish())
        for client in (bench.worker, bench.trainer):
            client.call(Goodbye())
        assert bench.process.wait(30) == 0
        assert critic.is_finished, "it was told by a heartbeat's answer"
        assert not critic.put_fields(group, {"values": [np.zeros(len(s.tokens), np.float32) for s in group.samples]})
        assert critic.read(wait_s=0) == list(critic.groups(wait_s=0)) == []


def test_a_read_under_way_when_the_run_ends_is_not_waited_for_as_long_as_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slimebus.client.consumer.LAST_ANSWER_S", 0.2)

    def answer(request: Request) -> Message | None:
        if isinstance(request.message, Heartbeat):
            return HeartbeatReply(finished=True)
        return None if isinstance(request.message, Read) else polite(request)

    server = Answering(answer)
    started = time.monotonic()
    try:
        with Consumer(server.server.endpoint, name="critic") as critic:
            assert critic.read(wait_s=20) == []
    finally:
        server.close()
    assert time.monotonic() - started < 10


def test_a_consumer_that_does_not_know_the_broker_says_so_in_time() -> None:
    started = time.monotonic()
    with pytest.raises(SlimebusError, match="no broker answered"):
        Consumer(f"tcp://127.0.0.1:{free_port()}", name="lost", timeout_s=1.0)
    assert time.monotonic() - started < 10
