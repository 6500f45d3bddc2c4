"""Calls of tools in the text of a reply.

    <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>         Hermes and Qwen; any number of them, after the content

Of other models' formats SGLang's own parsers take care, where an SGLang serves: asked over its `/parse_function_call`. What stands within
`<think>...</think>` is no call.
"""

import json
import re
import secrets
from typing import Any

from rollout.engines.sglang.client import EngineClient
from slimebus.bus.errors import UsageError

CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)

Calls = list[dict[str, Any]]


def parse(text: str) -> tuple[str, Calls]:
    """The content, and the calls as a message has them, arguments as a map. A call that is malformed stays content, and all behind it."""
    calls: Calls = []
    end = begin = _end_of_thinking(text)
    content = text
    for found in CALL.finditer(text, begin):
        try:
            given = json.loads(found[1])
            call = _call(given["name"], given.get("arguments", {}))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, UsageError):
            break
        content = text[: found.start()] if not calls else content
        end = found.end()
        calls.append(call)
    return (content.strip() + text[end:].rstrip() if calls else text), calls


def _end_of_thinking(text: str) -> int:
    """Where the answer begins; a thought that was not finished is all there is."""
    end = text.rfind("</think>") + len("</think>") if "</think>" in text else 0
    return len(text) if "<think>" in text[end:] else end


async def parse_by_sglang(client: object, parser: str, text: str, tools: list[dict[str, Any]]) -> tuple[str, Calls]:
    """The same by SGLang's parser of this name. UsageError where the engine has none: it is no SGLang, or the name is wrong."""
    if not isinstance(client, EngineClient):
        raise UsageError(f"the parser {parser!r} is SGLang's, and the engine is another; leave it empty for Hermes' form")
    thought, answer = text[: (end := _end_of_thinking(text))], text[end:]
    reply = await client.post_once("/parse_function_call", {"text": answer, "tools": tools, "tool_call_parser": parser})
    found = json.loads(reply)
    return thought + found["normal_text"], [_call(call["name"], call["parameters"]) for call in found["calls"]]


def _call(name: Any, arguments: Any) -> dict[str, Any]:
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise UsageError("a call of a tool has a name and a map of arguments")
    return {"id": f"call-{secrets.token_hex(6)}", "type": "function", "function": {"name": name, "arguments": arguments}}


def on_the_wire(calls: Calls) -> Calls:
    """As OpenAI's API has them: arguments are a text."""
    return [call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}} for call in calls]


def from_the_wire(calls: Calls) -> Calls:
    """As chat templates want them: arguments are a map. Raises UsageError."""
    try:
        return [_call(call["function"]["name"], call["function"]["arguments"]) | {"id": call.get("id")} for call in calls]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as bad:
        raise UsageError(f"tool_calls of a message cannot be read: {bad}") from None
