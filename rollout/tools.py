"""A generate hook that gives the policy the tools of MCP servers, by the `mcp` library: extra `slimebus[mcp]`."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

from rollout.endpoint.chat import Calls, parse
from rollout.samples.plugins import HIDDEN
from rollout.samples.session import Session
from slimebus.bus.errors import HookError, UsageError
from slimebus.process.process_guard import guarded_command

START_S = 60.0


class McpAgent:
    """Subclass it and name the servers. The policy may call their tools until it replies without a call.

    servers: a command with its arguments, started once a worker, or a URL. most_turns: of a sample. timeout_s: of a call.
    """

    servers: list[list[str] | str] = []
    most_turns = 8
    timeout_s = 60.0

    async def setup(self) -> None:
        """Connect, and learn which tools there are. Raises HookError."""
        self.tools: list[dict[str, Any]] = []
        self._clients: dict[str, Any] = {}
        self._stop = asyncio.Event()
        connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._connection = asyncio.create_task(self._connect(connected))  # mcp's connections end in the task that began them
        await asyncio.wait([connected, self._connection], timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        if not connected.done():
            self._connection.cancel()
            (bad,) = await asyncio.gather(self._connection, return_exceptions=True)
            while isinstance(bad, BaseExceptionGroup):  # of the task groups that mcp's connections are
                bad = bad.exceptions[0]
            raise HookError(f"MCP servers {self.servers} cannot be used: {type(bad).__name__}: {bad}")

    async def teardown(self) -> None:
        """Disconnect; servers that were started end."""
        self._stop.set()
        await asyncio.gather(self._connection, return_exceptions=True)

    async def _connect(self, connected: "asyncio.Future[None]") -> None:
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client

        async with AsyncExitStack() as stack:
            for server in self.servers:
                transport: Any = server
                if not isinstance(server, str):  # guarded: a worker that is killed leaves none behind
                    command, *arguments = guarded_command(server, HIDDEN.get())
                    transport = stdio_client(StdioServerParameters(command=command, args=arguments))
                client = await stack.enter_async_context(Client(transport))
                for tool in (await client.list_tools()).tools:
                    if tool.name in self._clients:
                        raise UsageError(f"two MCP servers have a tool {tool.name}")
                    self._clients[tool.name] = client
                    about = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
                    self.tools.append({"type": "function", "function": about})
            connected.set_result(None)
            await self._stop.wait()

    async def generate(self, session: Session) -> None:
        """Turns, and between them what the tools answered."""
        for turn in range(self.most_turns):
            session.metadata["tool_turns"] = turn
            reply = await session.generate(tools=self.tools)
            content, calls = parse(reply.text)
            if not calls or reply.finish_reason == "length":
                return
            session.messages[-1] = {"role": "assistant", "content": content, "tool_calls": calls}
            session.observe(await self.answers(calls))

    async def answers(self, calls: Calls) -> list[dict[str, Any]]:
        """A message for each call, in order; a tool that fails says so in its own."""
        texts = await asyncio.gather(*(self._call(**call["function"]) for call in calls))
        return [{"role": "tool", "tool_call_id": call["id"], "content": text} for call, text in zip(calls, texts, strict=True)]

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        if (client := self._clients.get(name)) is None:
            return f"error: there is no tool {name}"
        try:
            result = await client.call_tool(name, arguments, read_timeout_seconds=self.timeout_s)
        except (MCPError, TimeoutError) as bad:
            if isinstance(bad, MCPError) and bad.code == CONNECTION_CLOSED:  # nothing that the policy did, and so nothing to train it on
                raise HookError(f"the MCP server of tool {name} has ended; it is restarted when the worker is") from None
            return f"error: {bad}"
        text = "\n".join(part.text for part in result.content if part.type == "text")
        return f"error: {text}" if result.is_error else text
