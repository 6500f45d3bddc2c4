"""Tools of a real MCP server, a process of its own, for a policy of ours."""

import asyncio
import sys
from pathlib import Path

import pytest
from talk import Policy, session

from rollout.samples.session import Session
from rollout.tools import McpAgent
from slimebus.bus.errors import HookError

SERVER = Path(__file__).parents[1] / "fixtures" / "mcp_server.py"


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def play(policy: Policy, server: list[str], most_turns: int = 8) -> Session:
    made = session(policy)

    async def run() -> None:
        agent = McpAgent()
        agent.servers, agent.most_turns = [server], most_turns
        await asyncio.create_task(agent.setup())  # as the worker does: each call in a task of its own
        try:
            await asyncio.create_task(agent.generate(made))
        finally:
            await asyncio.create_task(agent.teardown())

    asyncio.run(run())
    return made


@pytest.fixture
def server() -> list[str]:
    return [sys.executable, str(SERVER)]


def test_the_policy_calls_tools_until_it_replies_without_a_call(server: list[str]) -> None:
    policy = Policy(call("add", '{"a": 2, "b": 3}') + call("nothing"), call("fail"), "5")
    made = play(policy, server)
    assert '"The sum."' in policy.seen[0] or "'The sum.'" in policy.seen[0]
    assert policy.seen[1].endswith("tool:5;tool:error: there is no tool nothing;assistant:")
    assert "tool:error: " in policy.seen[2]
    assert "broken" in policy.seen[2]
    (response,) = made.responses()
    assert response.loss_mask is not None
    assert response.token_ids[response.loss_mask == 1].tolist() == policy.sampled
    assert made.metadata == {"tool_turns": 2}


def test_a_policy_that_only_calls_is_ended(server: list[str]) -> None:
    policy = Policy(*[call("add", '{"a": 1, "b": 1}')] * 5)
    assert play(policy, server, most_turns=2).metadata == {"tool_turns": 1}
    assert len(policy.texts) == 3


def test_a_server_that_ended_fails_the_sample_and_is_no_answer_to_the_policy(server: list[str]) -> None:
    with pytest.raises(HookError, match="the MCP server of tool leave has ended"):
        play(Policy(call("leave")), server)


def test_servers_with_a_tool_of_one_name_are_refused_with_that_name(server: list[str]) -> None:
    agent = McpAgent()
    agent.servers = [server, server]
    with pytest.raises(HookError, match=r"cannot be used: .*two MCP servers have a tool add"):
        asyncio.run(agent.setup())


def test_a_server_that_does_not_start_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(HookError, match=r"no-such-program.* cannot be used"):
        play(Policy(), [str(tmp_path / "no-such-program")])
