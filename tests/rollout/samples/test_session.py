"""What a session records is what the engine was given and what it made."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from letters import Letters
from talk import CHAT, END, Policy

from rollout.samples.response import Response, Task, to_sample
from rollout.samples.session import Session
from slimebus.bus.errors import UsageError
from slimebus.bus.messages import NO_VERSION


def session(prompt: Any, policy: Policy, **limits: Any) -> Session:
    task = Task(prompt=prompt, prompt_ids=Letters().encode_prompt(prompt), sampling={"max_new_tokens": 50}, group="0/1", index=2)
    return Session(task, policy, Letters(), **limits)  # type: ignore[arg-type]


def play(made: Session, hook: Callable[[Session], Coroutine[Any, Any, Any]]) -> Session:
    asyncio.run(hook(made))
    return made


def test_turns_and_what_was_observed_are_recorded_with_mask_logprobs_and_versions() -> None:
    async def hook(session: Session) -> None:
        await session.generate()
        session.observe("??")
        reply = await session.generate(max_new_tokens=3)
        assert (reply.text, reply.token_ids.tolist(), reply.finish_reason) == ("yz", [ord("y"), ord("z"), END], "stop")

    policy = Policy("x", "yz")
    (response,) = play(session("ab", policy), hook).responses()
    sample = to_sample(response)
    assert sample.tokens.tolist() == [*map(ord, "abx"), END, *map(ord, "??yz"), END]
    assert sample.loss_mask.tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 1]
    assert sample.rollout_logprobs.tolist() == [0, 0, -1, -1, 0, 0, -2, -2, -2]
    assert sample.versions == [(NO_VERSION, 2), (0, 2), (NO_VERSION, 2), (1, 3)]
    assert (sample.trajectory, sample.turn, sample.status, response.text) == (2, 1, "completed", "yz")
    assert policy.seen == ["ab", "abx??"]
    assert [sampling["max_new_tokens"] for sampling in policy.sampling] == [50, 3]
    assert policy.sessions == {"0/1.2"}, "an engine that has the earlier turns is found by it"


def test_an_agent_that_sends_its_whole_conversation_makes_one_sample() -> None:
    async def hook(session: Session) -> None:
        messages: list[dict[str, Any]] = list(session.task.prompt)  # type: ignore[arg-type]
        for question in ("more", "again", ""):
            reply = await session.generate(messages)
            messages += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": question}]

    policy = Policy("A", "B", "C")
    made = play(session(CHAT, policy), hook)
    assert policy.seen[-1] == "user:hi;assistant:A;user:more;assistant:B;user:again;assistant:"
    (response,) = made.responses()
    assert [message["content"] for message in response.messages] == ["hi", "A", "more", "B", "again", "C"]
    assert response.loss_mask is not None
    trained = [np.concatenate(response.logprobs[response.loss_mask == 1].reshape(-1, 1)).tolist()]
    assert trained == [[-1, -1, -2, -2, -3, -3]]


def test_a_reply_that_comes_back_without_its_reasoning_keeps_it_in_the_record() -> None:
    async def hook(session: Session) -> None:
        await session.generate()
        await session.generate([*CHAT, {"role": "assistant", "content": "A"}, {"role": "user", "content": "more"}])

    policy = Policy("<think>why</think>A", "B")
    assert len(play(session(CHAT, policy), hook).responses()) == 1
    assert policy.seen[1] == "user:hi;assistant:<think>why</think>A;user:more;assistant:"


@pytest.mark.parametrize(
    ("context", "seen"),
    [
        ([{"role": "user", "content": "in short: hi, A, more"}], "user:in short: hi, A, more;assistant:"),
        ([*CHAT, {"role": "assistant", "content": "not A"}, {"role": "user", "content": "more"}],
         "user:hi;assistant:not A;user:more;assistant:"),
        ([ord("z")], "z"),
    ],
)  # fmt: skip
def test_a_context_that_does_not_begin_with_the_record_is_another_sample_of_the_trajectory(context: Any, seen: str) -> None:
    async def hook(session: Session) -> None:
        await session.generate()
        await session.generate(context)

    policy = Policy("A", "B")
    first, second = play(session(CHAT, policy), hook).responses()
    assert policy.seen[1] == seen
    assert [Letters().decode(r.token_ids) for r in (first, second)] == ["A", "B"]
    assert (first.turn, second.turn, first.task.index, second.task.index) == (0, 1, 2, 2)
    assert (first.versions, second.versions) == ([(0, 2)], [(1, 2)])


def test_conversations_that_alternate_go_on_each_in_its_own_sample() -> None:
    async def hook(session: Session) -> None:
        mine, other = list(CHAT), [{"role": "system", "content": "sub"}]
        for question in ("b", "c"):
            for messages, tools in ((mine, [{"n": 1}]), (other, [])):
                reply = await session.generate(messages, tools=tools)
                messages += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": question}]
            before = session.snapshot()
            await session.generate([*mine[:2], {"role": "user", "content": "no"}], tools=[{"n": 1}])
            session.restore(before)

    policy = Policy("A", "X", "-", "B", "Y", "-")
    responses = play(session(CHAT, policy), hook).responses()
    assert [Letters().decode(r.token_ids[r.loss_mask == 1]) for r in responses] == ["AB", "XY"]
    assert policy.seen[3:5] == ["[{'n': 1}]user:hi;assistant:A;user:b;assistant:", "system:sub;assistant:X;user:b;assistant:"]
    assert [r.turn for r in responses] == [2, 3]


def test_other_tools_before_the_first_turn_replace_the_prompt_and_later_ones_begin_another_sample() -> None:
    async def hook(session: Session) -> None:
        await session.generate(CHAT, tools=[{"n": 1}])
        await session.generate([*CHAT, {"role": "assistant", "content": "A"}, {"role": "user", "content": "b"}], tools=[{"n": 1}])
        await session.generate([*CHAT], tools=[{"n": 2}])

    policy = Policy("A", "B", "C")
    assert len(play(session(CHAT, policy), hook).responses()) == 2
    assert policy.seen == [
        "[{'n': 1}]user:hi;assistant:",
        "[{'n': 1}]user:hi;assistant:A;user:b;assistant:",
        "[{'n': 2}]user:hi;assistant:",
    ]


def test_token_ids_that_go_on_from_the_record_are_added_to_it() -> None:
    async def hook(session: Session) -> None:
        await session.generate()
        await session.generate([*session.token_ids.tolist(), ord("!")])

    policy = Policy("x", "y")
    (response,) = play(session("ab", policy), hook).responses()
    assert response.loss_mask is not None
    assert (policy.seen[1], response.loss_mask.tolist()) == ("abx!", [1, 1, 0, 1, 1])


def test_a_branch_trains_what_it_adds_and_no_token_is_trained_twice() -> None:
    async def hook(session: Session) -> None:
        await session.generate()
        branches = [session.branch() for _ in range(2)]
        await asyncio.gather(*(branch.generate(temperature=0.5) for branch in branches))

    made = play(session("ab", Policy("x", "y", "z")), hook)
    samples = [to_sample(response) for one in made.branches for response in one.responses()]
    assert [Letters().decode(s.tokens) for s in samples] == ["abx", "abxy", "abxz"]
    assert [s.loss_mask.tolist() for s in samples] == [[0, 0, 1, 1], [0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1]]
    assert [s.trajectory for s in samples] == [2, 2, 2]
    assert [s.temperature for s in samples] == [1.0, 0.5, 0.5]


def test_text_before_the_first_turn_is_the_beginning_of_the_reply() -> None:
    async def hook(session: Session) -> None:
        session.observe("so ")
        await session.generate()
        session.observe([{"role": "tool", "content": "7"}])
        session.observe([{"role": "user", "content": "ok?"}])
        await session.generate()

    policy = Policy("A", "B")
    made = play(session(CHAT, policy), hook)
    assert policy.seen == ["user:hi;assistant:so ", "user:hi;assistant:so A;tool:7;user:ok?;assistant:"]
    assert made.messages[1] == {"role": "assistant", "content": "so A"}


def test_a_reply_that_was_cut_off_may_go_on() -> None:
    async def hook(session: Session) -> None:
        await session.generate()
        await session.generate()

    made = play(session(CHAT, Policy("A", "B", reason="length")), hook)
    assert [m["content"] for m in made.messages] == ["hi", "AB"]


def test_a_turn_ends_where_the_context_does() -> None:
    async def hook(session: Session) -> None:
        await session.generate()
        session.observe("!!")
        full = await session.generate()
        assert (len(full.token_ids), full.finish_reason) == (0, "length")

    policy = Policy("x", "y")
    (response,) = play(session("ab", policy, max_context_len=6), hook).responses()
    assert [sampling["max_new_tokens"] for sampling in policy.sampling] == [4]
    assert (response.finish_reason, len(response.token_ids)) == ("length", 4)


def test_what_a_session_cannot_do_is_said() -> None:
    async def hook(session: Session) -> None:
        with pytest.raises(UsageError, match="messages were added to a prompt that is text"):
            session.observe(CHAT)
        await session.generate()
        with pytest.raises(UsageError, match=r"a turn at temperature 0.5 after one at 1: .* one temperature"):
            await session.generate(temperature=0.5)
        turn = asyncio.create_task(session.generate())
        await asyncio.sleep(0)
        with pytest.raises(UsageError, match="one turn at a time"):
            await session.generate()
        with pytest.raises(UsageError, match="one turn at a time"):
            session.observe("seen too late")
        with pytest.raises(UsageError, match="one turn at a time"):
            session.branch()
        await turn
        with pytest.raises(UsageError, match="messages cannot be a demonstration"):
            session.observe(CHAT, is_trained=True)

    class Slow(Policy):
        async def sample(self, tasks: list[Task], begun: Any = None) -> list[Response]:
            await asyncio.sleep(0.01)
            return await super().sample(tasks, begun)

    play(session("ab", Slow("x", "y")), hook)


def test_what_the_engine_made_is_kept_as_it_came(tmp_path: Path) -> None:
    """Token in, token out: ids that would be tokenised otherwise stay as they are."""

    class Odd(Letters):
        def decode(self, ids: np.ndarray) -> str:
            return "?"

        def encode(self, text: str) -> np.ndarray:
            return np.full(len(text), 1, np.int32)

    async def hook(session: Session) -> None:
        await session.generate()
        session.observe("a")
        await session.generate()

    task = Task(prompt="ab", prompt_ids=np.array([5, 6], np.int32), sampling={})
    made = play(Session(task, Policy("x", "y"), Odd()), hook)  # type: ignore[arg-type]
    assert made.token_ids.tolist() == [5, 6, ord("x"), END, 1, ord("y"), END]


def test_tools_that_the_template_refuses_are_not_kept_and_none_may_be_given() -> None:
    class Strict(Letters):
        def encode_prompt(self, prompt: Any, tools: Any = None) -> np.ndarray:
            if tools == [{"bad": 1}]:
                raise ValueError("no function")
            return super().encode_prompt(prompt, tools)

    task = Task(prompt=CHAT, prompt_ids=Letters().encode_prompt(CHAT), sampling={})
    made = Session(task, Policy("x", "y"), Strict())  # type: ignore[arg-type]

    async def hook(session: Session) -> None:
        with pytest.raises(ValueError, match="no function"):
            await session.generate(CHAT, tools=[{"bad": 1}])
        assert session.tools is None
        await session.generate(CHAT, tools=[{"good": 1}])
        assert session.tools == [{"good": 1}]
        await session.generate(CHAT, tools=[])
        assert session.tools is None

    assert len(play(made, hook).responses()) == 2
