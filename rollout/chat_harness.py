"""The harness of verifiers' agents that bring none: a chat with tools in this process.

verifiers' own do the same in a process for each sample, which they install with `uv`.
"""

import functools
import json
import ssl
from contextlib import AsyncExitStack
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

from slimebus.prompts.verifiers_tasks import messages_of

__all__ = ["ChatHarness"]

certificates = functools.cache(ssl.create_default_context)
"""Reading them takes 30 ms, once and not for each episode."""


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """Turns, and between them what the task's tools answered, until a reply without a call."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any) -> Any:
        """Talk to the model at `endpoint`, which is verifiers' own and passes everything on. Raises what went wrong."""
        messages: list[Any] = messages_of(data)
        async with AsyncExitStack() as stack:
            http = DefaultAsyncHttpxClient(verify=certificates(), timeout=None)
            client = await stack.enter_async_context(AsyncOpenAI(base_url=endpoint, api_key=secret, http_client=http, max_retries=0))
            urls = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            tools, known, servers = await connect_mcp({"mcpServers": urls}, stack)
            more: dict[str, Any] = {"tools": tools} if tools else {}
            while True:
                answer = await client.chat.completions.create(model=ctx.model, messages=messages, **more)
                reply: Any = answer.choices[0].message
                messages.append(reply.model_dump(exclude_none=True))
                if not reply.tool_calls:
                    return vf.ProgramResult(0, "", "")
                for call in reply.tool_calls:
                    try:
                        content = await call_mcp(servers, known, call.function.name, json.loads(call.function.arguments))
                    except Exception as bad:  # noqa: BLE001  the policy reads what failed, for any tool
                        content = f"error: {bad!r}"
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
