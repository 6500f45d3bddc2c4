"""Agents from outside that leave, hurry, repeat themselves or send nonsense: none of it reaches another agent's session."""

import asyncio
import threading
import time
from typing import Any

import aiohttp
import openai
import pytest
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
        slot = agents.endpoint._slots["one"]
        second = asyncio.create_task(turn(agents, "one"))
        while not slot.turn._waiters:  # type: ignore[attr-defined]
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
def waiting(monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[str]:
    """The names of requests that wait for a session, as they begin to; "left" once one has left."""
    requests: asyncio.Queue[str] = asyncio.Queue()
    claim = Endpoint._claim_session

    async def noted(self: Endpoint, name: str) -> Any:
        requests.put_nowait(name)
        try:
            return await claim(self, name)
        except asyncio.CancelledError:
            requests.put_nowait("left")
            raise

    monkeypatch.setattr(Endpoint, "_claim_session", noted)
    return requests


def test_two_first_requests_of_one_id_take_one_session(waiting: asyncio.Queue[str]) -> None:
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


def test_a_client_that_left_takes_no_session(waiting: asyncio.Queue[str]) -> None:
    async def whole() -> int:
        agents = OutsideAgents()
        agents.bind = "127.0.0.1:0"
        await agents.setup()
        async with aiohttp.ClientSession() as http:
            gone = asyncio.create_task(http.post(agents.endpoint.base_url + "/sessions"))
            await waiting.get()
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
        assert await waiting.get() == "left"
        offered = asyncio.create_task(agents.generate(session(Policy("A"))))
        async with asyncio.timeout(5):
            status, _ = await post(agents, "/sessions")
        offered.cancel()
        await asyncio.gather(offered, return_exceptions=True)
        await agents.teardown()
        return status

    assert asyncio.run(whole()) == 200


def test_a_session_that_ended_before_anybody_took_it_is_let_go_of() -> None:
    async def whole() -> tuple[int, str]:
        endpoint = Endpoint()
        made = [session(Policy()) for _ in range(100)]
        for one in made:
            endpoint.release(endpoint.publish(one))
        last = endpoint.publish(session(Policy()))
        assert (last.session.is_waiting, made[0].is_waiting, len(endpoint._free)) == (True, False, 1)
        return len(endpoint._slots), (await endpoint._claim_session("one")).name

    assert asyncio.run(whole()) == (0, "one")


def test_no_time_passes_while_a_session_waits_for_an_agent() -> None:
    async def whole() -> None:
        endpoint, made = Endpoint(), session(Policy())
        slot = endpoint.publish(made)
        made.began_at -= 1000.0
        assert made.is_waiting
        assert await endpoint._claim_session("one") is slot
        assert not made.is_waiting
        assert time.monotonic() - made.began_at < 100

    asyncio.run(whole())


class Judged(OutsideAgents):
    def judge(self, made: Session, messages: list[dict[str, Any]]) -> float | None:
        """Plain, slow for one agent; raises for another."""
        said = messages[-1]["content"]
        if said == "wait":
            go.wait(20)
            return 0.25 if made.text == "A" else None
        if said == "raise":
            raise KeyError("no such grade")
        return 0.5


go = threading.Event()


def test_neither_its_own_reply_nor_another_waits_for_a_slow_judge_and_one_that_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    go.clear()

    async def talk(agents: OutsideAgents, made: list[Session]) -> None:
        async with client_of(agents, "one") as one, client_of(agents, "two") as two:
            for client in (one, two):
                await ask(client, CHAT)
            assert (await ask(one, [*CHAT, {"role": "assistant", "content": "A"}, {"role": "user", "content": "wait"}])).choices
            assert (await ask(two, [*CHAT, {"role": "assistant", "content": "C"}, {"role": "user", "content": "raise"}])).choices
        for name in ("one", "two"):
            await post(agents, f"/sessions/{name}", method="DELETE")
        go.set()

    first, second = visit(talk, Policy("A", "B"), Policy("C", "D"), hook=Judged)
    assert (first.reward, texts(first)) == (0.25, ["B"])
    assert (second.reward, texts(second)) == (None, ["D"])
    assert "Judged.judge failed at" in caplog.text
    assert "KeyError: 'no such grade'" in caplog.text


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
