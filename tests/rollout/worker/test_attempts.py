"""What becomes of a leased group that does not end by itself: recalled, or out of time."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from parrot import Parrot, maker

from rollout.samples import partials
from rollout.samples.response import Response, Task
from rollout.worker.attempts import Attempts
from slimebus.bus.messages import GiveBack, LeasedGroup, Message, Ok, Put, PutReply
from slimebus.bus.samples import decode_group
from slimebus.bus.transport.request import ReceivedReply
from slimebus.config import resolve
from slimebus.telemetry.spans import Spans

PROMPT = {"prompt": "ab", "label": "x"}


class Endless:
    """An engine that makes `per_call` tokens of version 5 for each sample and then goes on for ever, until it is asked to end."""

    lineage = "L"

    def __init__(self, per_call: int) -> None:
        self.per_call, self.begun, self.ended, self.began = per_call, [], asyncio.Event(), asyncio.Event()  # type: ignore[var-annotated]
        self.queued = 0
        """How often it still says that the group waits for room."""

    async def sample(self, tasks: list[Task], begun: list[Response] | None = None) -> list[Response]:
        made = begun or [partials.empty_response(task) for task in tasks]
        self.begun = [len(response.token_ids) for response in made]
        self.began.set()
        await self.ended.wait()
        self.ended.clear()
        more = np.arange(self.per_call, dtype=np.int32)
        raise partials.Unfinished([self._more(response, more) for response in made])

    def _more(self, response: Response, more: np.ndarray) -> Response:
        versions = partials.join_runs(response.versions, [(5, len(more))])
        logprobs = np.concatenate([response.logprobs, np.zeros(len(more), np.float32)])
        return msgspec.structs.replace(response, token_ids=np.concatenate([response.token_ids, more]), logprobs=logprobs, versions=versions)

    async def recall(self, group: str) -> None:
        self.ended.set()

    def is_waiting(self, group: str) -> bool:
        self.queued -= 1
        return self.queued >= 0

    def forget(self, group: str) -> int:
        return 20


class Answering(Parrot):
    """An engine that answers at once."""

    lineage = "L"

    def forget(self, group: str) -> int:
        return 20


class Broker:
    """Takes whatever it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Message, Any]] = []

    async def ask(self, message: Message, bulk: Any = (), **_: Any) -> ReceivedReply:
        self.told.append((message, bulk))
        return ReceivedReply(PutReply(result="accepted") if isinstance(message, Put) else Ok(), [])


def lease(number: int, partial: Any = ()) -> tuple[LeasedGroup, bytes, Any]:
    leased = LeasedGroup(group="0/1", lease=number, num_samples=2, deadline_s=60, version=5, partial_frames=len(partial))
    return leased, msgspec.msgpack.encode(PROMPT), partial


def attempts(tmp_path: Path, engine: Any, plug: str = "", **flags: str) -> tuple[Attempts, Broker]:
    broker, made = Broker(), maker(tmp_path, plug, engine, **flags)
    config = resolve(None, {f"rollout.{name}": value for name, value in flags.items()}, {}).config
    spans = Spans(tmp_path, "w")
    return Attempts(config.rollout, broker, made, engine, max_group_bytes=0, spans=spans, give_up=_fail), broker  # type: ignore[arg-type]


def _fail(error: BaseException) -> None:
    raise error


async def done(of: Attempts) -> None:
    await asyncio.wait_for(asyncio.gather(*(attempt.task for attempt in of.running.values()), return_exceptions=True), 10)


def test_a_group_out_of_time_is_given_back_with_what_there_is_and_no_attempt_is_counted(tmp_path: Path) -> None:
    async def run() -> list[tuple[Message, Any]]:
        of, broker = attempts(tmp_path, Endless(3), generate_timeout_s="0.05")
        of.begin_attempt(*lease(1))
        await done(of)
        of.begin_attempt(*lease(2, broker.told[0][1]))
        await done(of)
        assert of.counts.failed == 0
        return broker.told

    told = asyncio.run(run())
    assert [(back.outcome, back.reason) for back, _ in told if isinstance(back, GiveBack)] == [
        ("partial", "no end within generate_timeout_s = 0.05 s")
    ] * 2
    samples = decode_group(told[1][1])
    assert [(s.tokens.tolist(), s.versions, s.status) for s in samples] == [([97, 98, 0, 1, 2, 0, 1, 2], [(-1, 2), (5, 6)], "aborted")] * 2


def test_a_group_out_of_time_without_a_new_token_is_a_failed_attempt(tmp_path: Path) -> None:
    async def run() -> GiveBack:
        of, broker = attempts(tmp_path, Endless(0), generate_timeout_s="0.05")
        begun = await _begun(tmp_path)
        of.begin_attempt(*lease(1, begun))
        await done(of)
        assert of.counts.failed == 1
        (back, frames) = broker.told[0]
        assert isinstance(back, GiveBack)
        assert not frames
        return back

    back = asyncio.run(run())
    assert (back.outcome, back.reason) == ("fail", "no end within generate_timeout_s = 0.05 s, and no token")


def test_waiting_for_room_at_an_engine_is_not_counted(tmp_path: Path) -> None:
    async def run() -> None:
        engine = Endless(3)
        engine.queued = 4
        of, _ = attempts(tmp_path, engine, generate_timeout_s="0.05")
        begun = asyncio.get_running_loop().time()
        of.begin_attempt(*lease(1))
        await done(of)
        assert asyncio.get_running_loop().time() - begun >= 5 * 0.05

    asyncio.run(run())


async def _begun(tmp_path: Path) -> Any:
    """The frames of a partial of three tokens a sample."""
    of, broker = attempts(tmp_path, Endless(3), generate_timeout_s="0.05")
    of.begin_attempt(*lease(9))
    await done(of)
    return broker.told[0][1]


def test_a_recalled_group_is_given_back_with_what_there_is(tmp_path: Path) -> None:
    async def run() -> list[tuple[Message, Any]]:
        engine = Endless(2)
        of, broker = attempts(tmp_path, engine)
        of.begin_attempt(*lease(1))
        await engine.began.wait()
        for _ in range(3):  # each heartbeat says so again
            of.recall(1)
        of.recall(77)
        await done(of)
        return broker.told

    ((back, frames),) = asyncio.run(run())
    assert isinstance(back, GiveBack)
    assert (back.outcome, back.reason, back.lineage) == ("partial", "recalled", "L")
    assert [s.tokens.tolist() for s in decode_group(frames)] == [[97, 98, 0, 1]] * 2


def test_what_a_hook_makes_is_given_back_at_once_and_begun_anew(tmp_path: Path, caplog: Any) -> None:
    async def run() -> tuple[Attempts, list[tuple[Message, Any]]]:
        engine = Endless(2)
        plug = "async def g(session): await session.generate()"
        of, broker = attempts(tmp_path, engine, plug, custom_generate_function_path="plug.py:g")
        of.begin_attempt(*lease(1))
        await engine.began.wait()
        of.recall(1)
        of.recall(1)
        await done(of)
        return of, broker.told

    of, ((back, frames),) = asyncio.run(run())
    assert isinstance(back, GiveBack)
    assert (back.outcome, back.reason, back.num_tokens, frames) == ("requeue", "recalled and begun anew", 20, [])
    assert of.counts.begun_anew == 1
    assert [record.levelname for record in caplog.records if "sessions that take longer than broker.max_staleness" in record.message] == [
        "WARNING"
    ]


def test_what_was_made_before_the_lease_is_not_trained_with_the_mask(tmp_path: Path) -> None:
    class Ends(Endless):
        async def sample(self, tasks: list[Task], begun: list[Response] | None = None) -> list[Response]:
            made = begun or [partials.empty_response(task) for task in tasks]
            return [
                msgspec.structs.replace(
                    response,
                    token_ids=np.append(response.token_ids, np.int32(7)),
                    logprobs=np.append(response.logprobs, np.float32(-1)),
                    versions=partials.join_runs(response.versions, [(6, 1)]),
                    finish_reason="stop",
                )
                for response in made
            ]

    async def run(mask: str) -> list[Any]:
        begun = await _begun(tmp_path)
        of, broker = attempts(tmp_path, Ends(0), mask_offpolicy_in_partial_rollout=mask)
        leased, record, partial = lease(2, begun)
        of.begin_attempt(msgspec.structs.replace(leased, version=6), record, partial)
        await done(of)
        return [(s.loss_mask.tolist(), s.versions) for s in decode_group(broker.told[-1][1])]

    versions = [(-1, 2), (5, 3), (6, 1)]
    assert asyncio.run(run("true")) == [([0, 0, 0, 0, 0, 1], versions)] * 2
    assert asyncio.run(run("false")) == [([0, 0, 1, 1, 1, 1], versions)] * 2


def test_an_engine_with_room_is_given_its_next_group_before_work_on_samples_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.worker.attempts.REFILL_S", 60.0)

    async def run() -> None:
        of, broker = attempts(tmp_path, Answering(), rm_type="random")
        texts = list[object]()
        monkeypatch.setattr(of.maker.tokenizer, "decode", lambda ids: texts.append(ids) or "")
        of.begin_attempt(*lease(1))
        await asyncio.wait_for(of.ended.wait(), 10)  # as the worker does once it is full
        assert (of.num_samples, texts, broker.told) == (0, [], [])
        await of.cancel()
        assert [type(message) for message, _ in broker.told] == [GiveBack]

        of.ended.set()  # nobody waits for room: a group is put at once
        of.begin_attempt(*lease(2))
        await done(of)
        assert (len(texts), type(broker.told[-1][0])) == (2, Put)

    asyncio.run(run())


def test_while_rewards_are_computed_others_are_sampled_up_to_as_many_again(tmp_path: Path) -> None:
    plug = f"""import pathlib, time
def reward(response):
    while not pathlib.Path({str(tmp_path / "scored")!r}).exists():
        time.sleep(0.01)
    return 1.0
"""

    async def run() -> list[int]:
        flags = {"custom_rm_path": "plug.py:reward", "max_running_groups": "1", "n_samples_per_prompt": "2"}
        of, broker = attempts(tmp_path, Answering(), plug, **flags)
        taken = []
        for number in (1, 2):
            of.ended.clear()
            of.begin_attempt(*lease(number))
            taken.append(of.num_samples)
            await asyncio.wait_for(of.ended.wait(), 10)  # it is sampled; its rewards wait
            taken.append(of.num_samples)
        (tmp_path / "scored").touch()
        await done(of)
        assert [type(message) for message, _ in broker.told] == [Put, Put]
        return [*taken, of.num_samples]

    assert asyncio.run(run()) == [2, 0, 2, 2, 0]
