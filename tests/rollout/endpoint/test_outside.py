"""Agents from outside that leave, hurry, repeat themselves or send nonsense: none of it reaches another agent's session."""

import asyncio
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web
from jinja2 import TemplateError
from letters import Letters
from openai import AsyncOpenAI
from talk import CHAT, TOOLS, Policy, ask, client_of, post, session, visit

from rollout.endpoint import OutsideAgents
from rollout.endpoint.server import Endpoint
from rollout.samples.response import Response, Task
from rollout.samples.session import Session


class Held(Policy):
    """Says nothing before `go`; `asked` is set with each request."""

    def __init__(self, *texts: str) -> None:
        super().__init__(*texts)
        self.asked, self.go = asyncio.Event(), asyncio.Event()

    async def sample(self, tasks: list[Task], begun: Any = None) -> list[Response]:
        self.asked.set()
        await self.go.wait()
        return await super().sample(tasks, begun)


def texts(made: Session) -> list[str]:
    return [response.text for response in made.responses()]


async def turn(agents: OutsideAgents, name: str, **more: Any) -> Any:
    async with client_of(agents, name) as client:
        return await ask(client, CHAT, **more)


def test_a_reward_before_any_reply_is_not_the_next_agents() -> None:
    async def talk(agents: OutsideAgents, made: list[Session]) -> None:
        _, about = await post(agents, "/sessions")
        assert (await post(agents, f"/sessions/{about['id']}/reward", {"reward": 0.9}))[0] == 200
        await turn(agents, "two")
        await post(agents, "/sessions/two", method="DELETE")

    (made,) = visit(talk, Policy("A"))
    assert (texts(made), made.reward) == (["A"], None)


def test_a_turn_under_way_when_its_agent_left_is_the_end_of_its_own_session() -> None:
    one, two = Held("from one"), Policy("from two")

    async def talk(agents: OutsideAgents, made: list[Session]) -> None:
        first = asyncio.create_task(turn(agents, "one"))
        await one.asked.wait()
        await post(agents, "/sessions/one/reward", {"reward": 0.5})
        await turn(agents, "two")
        await post(agents, "/sessions/two", method="DELETE")
        one.go.set()
        await first

    first, second = visit(talk, one, two)
    assert (texts(first), first.reward) == (["from one"], 0.5)
    assert (texts(second), second.reward) == (["from two"], None)


def test_of_a_turn_that_failed_nothing_is_left_for_the_next_agent() -> None:
    class Fails(Held):
        async def sample(self, tasks: list[Task], begun: Any = None) -> list[Response]:
            if not self.asked.is_set():
                self.asked.set()
                await self.go.wait()
                raise ValueError("no")
            return await super().sample(tasks, begun)

    policy = Fails("A")

    async def talk(agents: OutsideAgents, made: list[Session]) -> None:
        first = asyncio.create_task(turn(agents, "one", tools=TOOLS))
        await policy.asked.wait()
        await post(agents, "/sessions/one/reward", {"reward": 0.5})
        policy.go.set()
        with pytest.raises(openai.BadRequestError):
            await first
        await turn(agents, "two")
        await post(agents, "/sessions/two", method="DELETE")

    (made,) = visit(talk, policy)
    assert (texts(made), made.reward, made.tools) == (["A"], None, None)


def test_a_request_that_waited_behind_the_end_is_refused() -> None:
    policy = Held("A", "B")

    async def talk(agents: OutsideAgents, made: list[Session]) -> None:
        first = asyncio.create_task(turn(agents, "one"))
        await policy.asked.wait()
        seat = agents.endpoint._seats["one"]
        second = asyncio.create_task(turn(agents, "one"))
        while not seat.turn._waiters:  # type: ignore[attr-defined]
            await asyncio.sleep(0.001)
        await post(agents, "/sessions/one/reward", {"reward": 1.0})
        policy.go.set()
        await first
        with pytest.raises(openai.APIStatusError) as refused:
            await second
        assert refused.value.status_code == 410

    (made,) = visit(talk, policy)
    assert texts(made) == ["A"]


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[web.Request]:
    """The requests that wait for a session, as they begin to."""
    requests: asyncio.Queue[web.Request] = asyncio.Queue()
    claim = Endpoint._claim

    async def noted(self: Endpoint, name: str, request: web.Request) -> Any:
        requests.put_nowait(request)
        return await claim(self, name, request)

    monkeypatch.setattr(Endpoint, "_claim", noted)
    return requests


def test_two_first_requests_of_one_id_take_one_session(waiting: asyncio.Queue[web.Request]) -> None:
    async def whole() -> list[Session]:
        agents, made = OutsideAgents(), [session(Policy("A", "B")), session(Policy("C", "D"))]
        agents.bind = "127.0.0.1:0"
        await agents.setup()
        turns = [asyncio.create_task(turn(agents, "one")) for _ in range(2)]
        for _ in turns:
            await waiting.get()
        offered = [asyncio.create_task(agents.generate(one)) for one in made]
        await asyncio.gather(*turns)
        for task in offered:
            task.cancel()
        await asyncio.gather(*offered, return_exceptions=True)
        await agents.teardown()
        return made

    assert [len(texts(one)) for one in asyncio.run(whole())] == [2, 0]


def test_a_client_that_left_takes_no_session(waiting: asyncio.Queue[web.Request]) -> None:
    async def whole() -> int:
        agents = OutsideAgents()
        agents.bind = "127.0.0.1:0"
        await agents.setup()
        async with aiohttp.ClientSession() as http:
            gone = asyncio.create_task(http.post(agents.endpoint.base_url + "/sessions"))
            request = await waiting.get()
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
        while request.transport is not None:
            await asyncio.sleep(0.001)
        offered = asyncio.create_task(agents.generate(session(Policy("A"))))
        async with asyncio.timeout(5):
            status, _ = await post(agents, "/sessions")
        offered.cancel()
        await asyncio.gather(offered, return_exceptions=True)
        await agents.teardown()
        return status

    assert asyncio.run(whole()) == 200


def test_a_session_id_is_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIMEBUS_ENDPOINT_KEY", "secret")

    async def talk(agents: OutsideAgents, made: list[Session]) -> None:
        async with client_of(agents, "user-1", key="secret") as client:
            await ask(client, CHAT)
        async with AsyncOpenAI(base_url=agents.endpoint.base_url, api_key="user-1", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                await ask(client, CHAT)
        await post(agents, "/sessions/user-1", method="DELETE", key="secret")

    (made,) = visit(talk, Policy("A", "B"))
    assert texts(made) == ["A"]


def test_a_request_without_tools_has_none() -> None:
    policy = Policy("A", "B")

    async def talk(agents: OutsideAgents, made: list[Session]) -> None:
        await turn(agents, "one", tools=TOOLS)
        await turn(agents, "one")
        await post(agents, "/sessions/one", method="DELETE")

    visit(talk, policy)
    assert [str(TOOLS) in seen for seen in policy.seen] == [True, False]


CALLS = [{"id": "1", "type": "function", "function": {"name": "a", "arguments": "[" * 100_000}}]


@pytest.mark.parametrize(
    "message",
    [
        {"content": "x"},
        {"role": [], "content": "x"},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user", "content": [{"type": "text", "text": 5}]},
        {"role": "user", "content": 5},
        {"role": "assistant", "content": "x", "tool_calls": 5},
        {"role": "assistant", "content": "x", "tool_calls": CALLS},
        {"role": "refused by the template", "content": "x"},
    ],
)
def test_a_malformed_message_is_a_400_in_openais_shape(message: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    encode = Letters.encode_prompt

    def strict(self: Letters, prompt: Any, tools: Any = None) -> Any:
        if any(one["role"] == "refused by the template" for one in prompt):
            raise TemplateError("unknown role")
        return encode(self, prompt, tools)

    monkeypatch.setattr(Letters, "encode_prompt", strict)

    async def talk(agents: OutsideAgents, made: list[Session]) -> None:
        async with client_of(agents, "one") as client:
            with pytest.raises(openai.BadRequestError) as refused:
                await ask(client, [message])
            assert isinstance(refused.value.body, dict)
            assert refused.value.body["type"] == "invalid_request_error"
            await ask(client, CHAT)
        await post(agents, "/sessions/one", method="DELETE")

    visit(talk, Policy("A"))


def test_a_message_that_the_template_refuses_leaves_the_conversation_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = Letters.encode_turn

    def strict(self: Letters, known: Any, new: Any, *tools: Any, **more: Any) -> Any:
        if any(one["role"] == "alien" for one in new):
            raise TemplateError("unknown role")
        return encode(self, known, new, *tools, **more)

    monkeypatch.setattr(Letters, "encode_turn", strict)

    async def talk(agents: OutsideAgents, made: list[Session]) -> None:
        async with client_of(agents, "one") as client:
            said = (await ask(client, CHAT)).choices[0].message.content
            more = [*CHAT, {"role": "assistant", "content": said}]
            with pytest.raises(openai.BadRequestError):
                await ask(client, [*more, {"role": "alien", "content": "x"}])
            await ask(client, [*more, {"role": "user", "content": "y"}])
        await post(agents, "/sessions/one", method="DELETE")

    (made,) = visit(talk, Policy("A", "B"))
    assert made.metadata == {"contexts": 1}
    assert [response.turn for response in made.responses()] == [1]
