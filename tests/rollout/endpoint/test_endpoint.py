"""Unmodified clients of `openai` speak to the endpoint; what they bring about is recorded exactly as it was sampled."""

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from talk import CALL, CHAT, END, TOOLS, Policy, ask, client_of, post, session, visit

from rollout.endpoint import Agent, OutsideAgents
from rollout.samples.plugins import PluginError
from rollout.samples.response import Response, Task
from rollout.samples.session import Session
from slimebus.bus.errors import HookError, Unreachable


def play(made: Session, run: Callable[..., Any], **fields: Any) -> Session:
    """The session, once the agent `run(task, client)` is done."""

    class Own(Agent):
        async def run(self, task: Task, base_url: str, api_key: str) -> float | None:
            async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
                found: float | None = await run(task, client)
                return found

    async def whole() -> None:
        agent = Own()
        vars(agent).update(fields)
        await agent.setup()
        try:
            await agent.generate(made)
        finally:
            await agent.teardown()

    asyncio.run(whole())
    return made


def trained(response: Response) -> list[int]:
    assert response.loss_mask is not None
    ids: list[int] = response.token_ids[response.loss_mask == 1].tolist()
    return ids


def test_an_agent_with_tools_is_one_sample_with_every_token_as_sampled() -> None:
    async def agent(task: Task, client: AsyncOpenAI) -> float:
        messages: list[Any] = list(task.prompt)
        for _ in range(3):
            choice = (await ask(client, messages, tools=TOOLS, temperature=0.3, max_tokens=20)).choices[0]
            messages.append(choice.message)
            for call in choice.message.tool_calls or []:
                given = json.loads(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(given["a"] + given["b"])})
        assert choice.finish_reason == "stop"
        return float(choice.message.content == f"it is {task.label}")

    policy = Policy(f"let me see {CALL}", CALL + CALL, "it is 3")
    made = play(session(policy), agent)
    (response,) = made.responses()
    assert trained(response) == policy.sampled
    assert (made.reward, made.metadata) == (1.0, {"contexts": 1})
    assert [version for version, _ in response.versions if version >= 0] == [0, 1, 2]
    assert policy.seen[1].endswith(f"{CALL};tool:3;assistant:")
    assert policy.seen[2].count("tool:3;") == 3
    assert policy.sampling[0] == {"max_new_tokens": 20}, "the temperature is the run's"
    assert str(TOOLS) in policy.seen[0]


def test_a_stream_says_the_same_as_an_answer() -> None:
    async def agent(task: Task, client: AsyncOpenAI) -> None:
        stream = await ask(client, CHAT, tools=TOOLS, stream=True, stream_options={"include_usage": True}, logprobs=True)
        chunks = [chunk async for chunk in stream]
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        assert "".join(delta.content or "" for delta in deltas) == "well"
        (call,) = [call for delta in deltas for call in delta.tool_calls or []]
        assert (call.index, call.function.name, json.loads(call.function.arguments)) == (0, "add", {"a": 1, "b": 2})
        assert chunks[-2].choices[0].finish_reason == "tool_calls"
        assert chunks[-1].usage.completion_tokens == len(f"well{CALL}") + 1

    play(session(Policy(f"well{CALL}")), agent)


def test_logprobs_and_usage_are_those_of_the_record() -> None:
    async def agent(task: Task, client: AsyncOpenAI) -> None:
        answer = await ask(client, CHAT, logprobs=True, max_completion_tokens=500)
        listed = answer.choices[0].logprobs.content
        assert [(entry.token, entry.logprob) for entry in listed] == [("o", -1.0), ("k", -1.0), ("", -1.0)]
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len("user:hi;assistant:"), 3)
        assert [model.id async for model in client.models.list()] == ["policy"]

    policy = Policy("ok")
    play(session(policy), agent)
    assert policy.sampling == [{"max_new_tokens": 50}], "no more than the run's"


def test_a_text_goes_on_from_the_record_token_by_token() -> None:
    async def agent(task: Task, client: AsyncOpenAI) -> None:
        text = task.prompt
        for more in (" and", "!"):
            answer = await client.completions.create(model="any", prompt=text, logprobs=0)
            text += answer.choices[0].text + more
        answer = await client.completions.create(model="any", prompt=[ord("z")])
        assert answer.choices[0].text == "C"

    policy = Policy("A", "B", "C")
    made = play(session(policy, "ab"), agent)
    assert policy.seen == ["ab", "abA and", "z"]
    assert [trained(response) for response in made.responses()] == [[ord("A"), END, ord("B"), END], [ord("C"), END]]
    assert made.metadata == {"contexts": 2}


def test_a_conversation_that_was_rewritten_is_another_sample_and_counted() -> None:
    async def agent(task: Task, client: AsyncOpenAI) -> None:
        await ask(client, CHAT)
        await ask(client, [{"role": "developer", "content": "short"}, {"role": "user", "content": [{"type": "text", "text": "again"}]}])

    policy = Policy("A", "B")
    made = play(session(policy), agent)
    assert [trained(response) for response in made.responses()] == [[ord("A"), END], [ord("B"), END]]
    assert policy.seen[1] == "system:short;user:again;assistant:"
    assert made.metadata == {"contexts": 2}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"n": 2}, "n"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "text alone"),
        ({"messages": []}, "messages"),
        ({"stop": [".", ""]}, "stop"),
    ],
)
def test_what_it_cannot_do_is_a_400_that_says_so(more: dict[str, Any], words: str) -> None:
    async def agent(task: Task, client: AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match=words):
            await ask(client, **({"messages": CHAT} | more))
        await ask(client, CHAT)

    assert len(play(session(Policy("A")), agent).responses()) == 1


def test_a_call_that_is_malformed_stays_text() -> None:
    async def agent(task: Task, client: AsyncOpenAI) -> None:
        for expected in ('<tool_call>{"name": </tool_call>', '<tool_call>{"name": "f", "arguments": 3}</tool_call>'):
            message = (await ask(client, CHAT, tools=TOOLS)).choices[0].message
            assert (message.content, message.tool_calls) == (expected, None)

    play(session(Policy('<tool_call>{"name": </tool_call>', '<tool_call>{"name": "f", "arguments": 3}</tool_call>')), agent)


def test_a_full_context_is_a_reply_that_was_cut_off() -> None:
    async def agent(task: Task, client: AsyncOpenAI) -> None:
        await ask(client, CHAT)
        choice = (await ask(client, [*CHAT, {"role": "assistant", "content": "A" * 40}, {"role": "user", "content": "more"}])).choices[0]
        assert (choice.finish_reason, choice.message.content) == ("length", "")

    play(session(Policy("A" * 40), max_context_len=60), agent)


def test_an_agents_error_is_the_agents_and_an_engines_the_engines() -> None:
    async def fails(task: Task, client: AsyncOpenAI) -> None:
        raise KeyError("mine")

    with pytest.raises(PluginError, match=r"Own.run failed at .*test_endpoint.py:\d+: KeyError: 'mine'"):
        play(session(Policy("A")), fails)

    class Gone:
        async def sample(self, tasks: list[Task], begun: Any = None) -> list[Response]:
            raise Unreachable("no engine")

    async def asks(task: Task, client: AsyncOpenAI) -> None:
        await ask(client, CHAT)

    with pytest.raises(Unreachable, match="no engine"):
        play(session(Gone()), asks)


def test_a_program_of_its_own_gets_the_task_and_the_address(tmp_path: Path) -> None:
    program = tmp_path / "agent.py"
    program.write_text(
        "import json, sys\nfrom openai import OpenAI\n"
        "task = json.load(sys.stdin)\n"
        "made = OpenAI().chat.completions.create(model='any', messages=task['prompt'])\n"
        "sys.exit(made.choices[0].message.content != 'A')\n"
    )

    class Own(Agent):
        command = [sys.executable, str(program)]

    async def run(made: Session) -> None:
        agent = Own()
        await agent.setup()
        try:
            await agent.generate(made)
        finally:
            await agent.teardown()

    asyncio.run(run(made := session(Policy("A"))))
    assert len(made.responses()) == 1
    with pytest.raises(PluginError, match="ended with exit status 1"):
        asyncio.run(run(session(Policy("B"))))


# --- agents from outside ---


def test_who_names_a_session_has_it_until_the_reward_is_known() -> None:
    async def talk(agents: OutsideAgents, made: list[Session]) -> None:
        async with client_of(agents, "one") as one, client_of(agents, "two") as two:
            first = [{"role": "user", "content": "mine"}]
            reply = (await ask(one, first)).choices[0].message
            await ask(two, CHAT)
            await ask(one, [*first, reply, {"role": "user", "content": "more"}])
        assert (await post(agents, "/sessions/one/reward", {"reward": 0.25}))[0] == 200
        assert (await post(agents, "/sessions/two", method="DELETE"))[0] == 200
        assert (await post(agents, "/sessions/other/reward", {"reward": 1}))[0] == 404

    first, second = visit(talk, Policy("A", "B"), Policy("C"))
    assert (first.reward, second.reward) == (0.25, None)
    (response,) = first.responses()
    assert trained(response) == [ord("A"), END, ord("B"), END]
    assert "".join(map(chr, response.prompt_ids)) == "user:mine;assistant:", "what the agent brought is the prompt"


def test_who_takes_a_session_learns_its_task() -> None:
    async def talk(agents: OutsideAgents, made: list[Session]) -> None:
        _, about = await post(agents, "/sessions")
        assert (about["prompt"], about["label"]) == (CHAT, "3")
        async with client_of(agents, about["id"]) as client:
            await ask(client, about["prompt"])
        await post(agents, f"/sessions/{about['id']}/reward", {"reward": 1.0})

    (made,) = visit(talk, Policy("A"))
    assert made.reward == 1.0


def test_the_next_message_may_say_what_the_last_turn_was_worth_and_silence_ends_a_session() -> None:
    class Chat(OutsideAgents):
        def judge(self, session: Session, messages: list[dict[str, Any]]) -> float | None:
            return float("thanks" in messages[-1]["content"])

    async def talk(agents: OutsideAgents, made: list[Session]) -> None:
        async with client_of(agents, "one") as client:
            reply = (await ask(client, CHAT)).choices[0].message
            await ask(client, [*CHAT, reply, {"role": "user", "content": "thanks"}])

    (made,) = visit(talk, Policy("A", "B"), hook=Chat, idle_s=0.3)
    assert (made.reward, len(made.responses())) == (1.0, 1)


def test_a_session_that_was_taken_and_not_used_is_offered_again() -> None:
    async def talk(agents: OutsideAgents, made: list[Session]) -> None:
        await post(agents, "/sessions")
        async with client_of(agents, "later") as client:
            await ask(client, CHAT)  # waits until the first one's time is over
        await post(agents, "/sessions/later", method="DELETE")

    (made,) = visit(talk, Policy("A"), idle_s=0.3)
    assert len(made.responses()) == 1


def test_a_key_is_asked_for_where_there_is_one_and_beyond_this_machine_there_must_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HookError, match="SLIMEBUS_ENDPOINT_KEY"):
        visit(lambda agents, made: asyncio.sleep(0), Policy(), bind="0.0.0.0:0")
    monkeypatch.setenv("SLIMEBUS_ENDPOINT_KEY", "secret")

    async def talk(agents: OutsideAgents, made: list[Session]) -> None:
        async with client_of(agents, "one", key="wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                await ask(client, CHAT)
        assert (await post(agents, "/sessions", key="wrong"))[0] == 401
        async with client_of(agents, "one", key="secret") as client:
            await ask(client, CHAT)
        assert (await post(agents, "/sessions/one", method="DELETE", key="wrong"))[0] == 401
        assert (await post(agents, "/sessions/one", method="DELETE", key="secret"))[0] == 200

    visit(talk, Policy("A"))


def test_a_plain_client_does_not_block_the_worker() -> None:
    class Own(Agent):
        def run(self, task: Task, base_url: str, api_key: str) -> float:  # type: ignore[override]
            with OpenAI(base_url=base_url, api_key=api_key) as client:
                return float(client.chat.completions.create(model="any", messages=CHAT).choices[0].message.content == "A")  # type: ignore[arg-type]

    async def whole(made: Session) -> None:
        agent = Own()
        await agent.setup()
        await agent.generate(made)
        await agent.teardown()

    asyncio.run(whole(made := session(Policy("A"))))
    assert made.reward == 1.0
