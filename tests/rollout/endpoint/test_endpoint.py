"""Unmodified clients of `openai` speak to the endpoint; what they bring about is recorded exactly as it was sampled."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import psutil
import pytest
from openai import AsyncOpenAI, OpenAI
from talk import CALL, CHAT, END, TOOLS, Policy, ask, client_of, post, session, visit
from waiting import wait_until

from rollout.endpoint import Agent, OutsideAgents
from rollout.endpoint.server import Endpoint
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
        ({"n": 2}, r"\$.n`; what changes the shape or the meaning of an answer is refused; docs/agents.md"),
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
        ({"functions": [{"name": "add"}]}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"tools": [{"type": "custom", "custom": {"name": "sql"}}]}, "tools has one of type 'custom'; expected 'function'"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "text alone"),
        ({"messages": []}, "messages"),
        ({"stop": [".", ""]}, "stop"),
    ],
)
def test_what_it_cannot_do_is_a_400_that_says_so(more: dict[str, Any], words: str) -> None:
    async def agent(task: Task, client: AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match=words):
            await ask(client, **({"messages": CHAT} | more))
        with pytest.raises(openai.BadRequestError, match="suffix"):
            await client.completions.create(model="any", prompt="a", suffix="b")
        await ask(client, CHAT)

    assert len(play(session(Policy("A")), agent).responses()) == 1


def test_what_else_a_request_has_is_taken_without_effect_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    async def agent(task: Task, client: AsyncOpenAI) -> None:
        named = {"type": "function", "function": {"name": "add"}}
        more = {"response_format": {"type": "json_object"}, "reasoning_effort": "low", "logit_bias": {"1": 5}, "prompt_cache_key": "x"}
        more |= {"parallel_tool_calls": False, "service_tier": "auto", "store": True, "metadata": {"a": "b"}, "user": "me", "seed": 1}
        extra = {"chat_template_kwargs": {"enable_thinking": False}, "top_k": 5, "model": None}
        for choice in ("required", named):
            answer = await ask(client, CHAT, tools=TOOLS, tool_choice=choice, extra_body=extra, **more)
            assert answer.choices[0].message.tool_calls[0].function.name == "add"
        assert (await client.completions.create(model="any", prompt=[[ord("z")]])).choices[0].text == "C"

    with caplog.at_level("INFO", "rollout"):
        play(session(policy := Policy(CALL, CALL, "C")), agent)
    assert policy.sampling == [{"max_new_tokens": 50}] * 3
    assert caplog.text.count("a request's field 'response_format' is taken without effect") == 1
    assert {"response_format (2)", "tool_choice (2)"} <= set(caplog.messages[-1].partition(": ")[2].split(", "))


def test_a_call_that_is_malformed_stays_text() -> None:
    async def agent(task: Task, client: AsyncOpenAI) -> None:
        for expected in ('<tool_call>{"name": </tool_call>', '<tool_call>{"name": "f", "arguments": 3}</tool_call>'):
            message = (await ask(client, CHAT, tools=TOOLS)).choices[0].message
            assert (message.content, message.tool_calls) == (expected, None)

    play(session(Policy('<tool_call>{"name": </tool_call>', '<tool_call>{"name": "f", "arguments": 3}</tool_call>')), agent)


def test_a_context_that_is_too_long_is_refused_as_openai_does_and_nothing_of_it_is_recorded() -> None:
    async def agent(task: Task, client: AsyncOpenAI) -> None:
        for known in ([], [*CHAT, (await ask(client, CHAT)).choices[0].message]):
            with pytest.raises(openai.BadRequestError, match=r"maximum context length is 60 tokens\. However, your messages") as refused:
                await ask(client, [*known, {"role": "user", "content": "x" * 1000}])
            assert refused.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await client.completions.create(model="any", prompt="x" * 1000)
        await ask(client, [*known, {"role": "user", "content": "ok"}])

    made = play(session(Policy("A", "B"), max_context_len=60), agent)
    (response,) = made.responses()
    assert (trained(response), response.turn, made.metadata) == ([ord("A"), END, ord("B"), END], 1, {"contexts": 1})


@pytest.mark.parametrize("text", [f"<think>{CALL}</think>{CALL}", f"{CALL}</think>{CALL}", f"<think>{CALL}"])
def test_a_call_that_is_only_thought_of_is_none(text: str) -> None:
    async def agent(task: Task, client: AsyncOpenAI) -> None:
        message = (await ask(client, CHAT, tools=TOOLS)).choices[0].message
        assert len(message.tool_calls or []) == text.count("</think>")
        assert message.content == text.removesuffix(CALL if "</think>" in text else "")

    play(session(Policy(text)), agent)


def test_a_parser_of_sglang_sees_the_marks_that_are_special_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    async def parsed(client: Any, parser: str, text: str, tools: Any) -> tuple[str, list[Any]]:
        seen.append(text)
        return text, []

    monkeypatch.setattr("rollout.endpoint.server.parse_by_sglang", parsed)
    policy = Policy(f"a{chr(END)}b")
    policy.pool = SimpleNamespace(engines_of=lambda model: [SimpleNamespace(client=None)])  # type: ignore[attr-defined]

    async def whole() -> None:
        endpoint = Endpoint(tool_call_parser="mistral")
        await endpoint.start("127.0.0.1", 0)
        slot = endpoint.open(session(policy))
        async with AsyncOpenAI(base_url=endpoint.base_url, api_key=slot.name) as client:
            assert (await ask(client, CHAT, tools=TOOLS)).choices[0].message.content == "ab"
        await endpoint.close()

    asyncio.run(whole())
    assert seen == [f"a{chr(END)}b"], "without the token that ended the reply"


def test_a_text_with_the_marks_of_the_template_goes_on_from_the_record() -> None:
    async def agent(task: Task, client: AsyncOpenAI) -> None:
        await client.completions.create(model="any", prompt="ab")
        await client.completions.create(model="any", prompt=f"abA{chr(END)}user:x")

    made = play(session(Policy("A", "B"), "ab"), agent)
    assert [trained(response) for response in made.responses()] == [[ord("A"), END, ord("B"), END]]


def test_a_turn_whose_client_left_is_not_trained_and_its_retry_is_one() -> None:
    class Slow(Policy):
        left = False

        async def sample(self, tasks: list[Task], begun: Any = None) -> list[Response]:
            if not self.left:
                self.left = True
                asked.set()
                await asyncio.sleep(60)
            return await super().sample(tasks, begun)

    asked = asyncio.Event()

    async def agent(task: Task, client: AsyncOpenAI) -> None:
        first = asyncio.create_task(ask(client, CHAT, stream=True))
        await asked.wait()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await ask(client, CHAT)

    (response,) = play(session(Slow("A")), agent).responses()
    assert trained(response) == [ord("A"), END]


@pytest.mark.parametrize("fails", [False, True])
def test_a_stream_is_kept_alive_while_its_reply_is_made(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    monkeypatch.setattr("rollout.endpoint.server.KEEP_ALIVE_S", 0.01)

    class Slow(Policy):
        async def sample(self, tasks: list[Task], begun: Any = None) -> list[Response]:
            await asyncio.sleep(0.1)
            if fails:
                raise ValueError("mine")
            return await super().sample(tasks, begun)

    async def agent(task: Task, client: AsyncOpenAI) -> None:
        response = await client.chat.completions.with_raw_response.create(model="x", messages=CHAT, stream=True)  # type: ignore[call-overload]
        lines = [line async for line in response.http_response.aiter_lines() if line]
        assert lines[0] == lines[1] == ": the reply is not there yet"
        assert lines[-1] == "data: [DONE]"
        assert ("mine" in lines[-2]) == fails

    play(session(Slow("A")), agent)


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


def test_an_agents_clients_share_their_connections() -> None:
    class Own(Agent):
        async def run(self, task: Task, base_url: str, api_key: str) -> float:
            one, two = self.client(api_key), self.client(api_key)
            assert one._client is two._client
            return float((await ask(one, CHAT)).choices[0].message.content == "A")

    async def whole(made: Session) -> None:
        agent = Own()
        await agent.setup()
        await agent.generate(made)
        await agent.teardown()
        assert agent._http.is_closed

    asyncio.run(whole(made := session(Policy("A"))))
    assert made.reward == 1.0


SECRETS = ("SLIMEBUS_X", "HF_TOKEN", "AWS_SECRET_ID")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_an_agents_program_started_ends_with_its_session_and_with_a_killed_worker(tmp_path: Path, number: signal.Signals) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import asyncio, sys, signal\nfrom rollout.endpoint import Agent\n"
        "class Own(Agent):\n    variables = ['MY_API_KEY']\n"
        "    command = ['sh', '-c', f'sleep 987 & echo $! $SLIMEBUS_X $HF_TOKEN $AWS_SECRET_ID $MY_API_KEY > {sys.argv[1]}; wait']\n"
        "class Nothing: prompt = label = metadata = None\n"
        "async def main():\n    task = asyncio.ensure_future(Own().run(Nothing, '', ''))\n"
        "    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)\n"
        "    await asyncio.gather(task, return_exceptions=True)\n"
        "asyncio.run(main())\n"
    )
    written = tmp_path / "pid"
    process = subprocess.Popen([sys.executable, worker, written], env=os.environ | dict.fromkeys(SECRETS, "x") | {"MY_API_KEY": "mine"})
    wait_until("its process id", lambda: written.is_file() and written.read_text().endswith("\n"))
    pid, *variables = written.read_text().split()
    assert variables == ["mine"]
    process.send_signal(number)
    process.wait(20)
    wait_until("end of what it started", lambda: not psutil.pid_exists(int(pid)))


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
