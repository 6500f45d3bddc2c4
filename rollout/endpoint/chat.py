"""Requests and answers in OpenAI's shapes, and the calls of tools in the text of a reply.

    <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>         Hermes and Qwen; any number of them, after the content

Of other models' formats SGLang's own parsers take care, where an SGLang serves: asked over its `/parse_function_call`. What stands within
`<think>...</think>` is no call.
"""

import json
import re
import secrets
import time
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec

from rollout.engines.sglang.client import EngineClient
from rollout.samples.response import Response
from rollout.samples.session import Session
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


WITHOUT_EFFECT = "is taken without effect: the run says how the policy is sampled (docs/agents.md)"
REFUSED = "what changes the shape or the meaning of an answer is refused; docs/agents.md lists what is served"
MESSAGE_FIELDS = ("role", "content", "name", "tool_call_id", "tool_calls", "reasoning_content")
One = Annotated[int, msgspec.Meta(ge=1, le=1)]
Zero = Annotated[int, msgspec.Meta(ge=0, le=0)]
Nothing = Annotated[list[Any], msgspec.Meta(max_length=0)]


class _Request(msgspec.Struct, kw_only=True):
    """What both kinds have. Any other field is taken without effect, and counted."""

    model: str | None = None
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    stop: str | list[Annotated[str, msgspec.Meta(min_length=1)]] | None = None
    n: One | None = 1

    def sampling(self, session: Session) -> dict[str, Any]:
        """What of it goes to the engine: no more tokens than the run has, and stop strings."""
        most = min(filter(None, (self.max_tokens, session.task.sampling.get("max_new_tokens"))), default=None)
        return ({"max_new_tokens": most} if most else {}) | ({"stop": self.stop} if self.stop else {})


class ChatRequest(_Request, kw_only=True):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    logprobs: bool | None = False
    top_logprobs: Zero | None = None
    functions: Nothing | None = None
    modalities: list[Literal["text"]] | None = None

    def __post_init__(self) -> None:
        self.max_tokens = self.max_completion_tokens or self.max_tokens
        if other := [tool.get("type") for tool in self.tools or () if tool.get("type") != "function"]:
            raise ValueError(f"tools has one of type {other[0]!r}; expected 'function'")


class TextRequest(_Request, kw_only=True):
    """Body of /v1/completions."""

    prompt: str | list[int | str | list[int]]
    logprobs: Annotated[int, msgspec.Meta(ge=0)] | None = None
    echo: Literal[False] | None = False
    suffix: Literal[""] | None = None


def plain_message(given: dict[str, Any]) -> dict[str, Any]:
    """A message as chat templates want it. Raises UsageError where it has no role, or content that is not text."""
    message = {name: given[name] for name in MESSAGE_FIELDS if given.get(name) is not None}
    content = message.get("content", "")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
        content = "".join(map(str, parts)) if all(isinstance(part, str) for part in parts) else None
    if not isinstance(content, str) or not isinstance(message.get("role"), str):
        raise UsageError("a message has no role, or a part that is no text; this endpoint serves text alone")
    message["content"] = content
    if message.get("role") == "developer":
        message["role"] = "system"
    if calls := message.pop("tool_calls", None):
        message["tool_calls"] = from_the_wire(calls)
    return message


def chat_answer(session: Session, made: Response, message: dict[str, Any], body: ChatRequest, num_prompt_tokens: int) -> dict[str, Any]:
    """A chat.completion; message: the reply as the record has it."""
    calls = message.get("tool_calls", [])
    shown = {"role": "assistant", "content": message["content"] or (None if calls else ""), "refusal": None}
    shown |= {"tool_calls": on_the_wire(calls)} if calls else {}
    tokens = _tokens(session, made) if body.logprobs else []
    listed = [{"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []} for token, logprob in tokens]
    reason = "length" if made.finish_reason == "length" else "tool_calls" if calls else "stop"
    choice = {
        "index": 0,
        "message": shown,
        "logprobs": {"content": listed, "refusal": None} if body.logprobs else None,
        "finish_reason": reason,
    }
    return _answer("chatcmpl", "chat.completion", body.model, choice, num_prompt_tokens, made)


def text_answer(session: Session, made: Response, body: TextRequest, num_prompt_tokens: int) -> dict[str, Any]:
    """A text_completion."""
    tokens = _tokens(session, made) if body.logprobs is not None else []
    listed = {"tokens": [token for token, _ in tokens], "token_logprobs": [logprob for _, logprob in tokens], "top_logprobs": None}
    choice = {"index": 0, "text": made.text, "logprobs": listed if body.logprobs is not None else None, "finish_reason": made.finish_reason}
    return _answer("cmpl", "text_completion", body.model, choice, num_prompt_tokens, made)


def chunks(answer: dict[str, Any], *, has_usage: bool) -> Iterator[dict[str, Any]]:
    """The answer as a stream has it: role, text, finish reason and usage."""
    usage, choice = answer.pop("usage"), answer["choices"][0]
    reason = choice.pop("finish_reason")
    if answer["object"] == "chat.completion":
        answer["object"] += ".chunk"
        message = choice.pop("message")
        message["tool_calls"] = [{"index": at} | call for at, call in enumerate(message.get("tool_calls", []))] or None
        yield answer | {"choices": [{"index": 0, "delta": {"role": message.pop("role"), "content": ""}, "finish_reason": None}]}
        choice["delta"] = {name: value for name, value in message.items() if value is not None}
        last = {"index": 0, "delta": {}}
    else:
        last = {"index": 0, "text": ""}
    yield answer | {"choices": [choice | {"finish_reason": None}]}
    yield answer | {"choices": [last | {"finish_reason": reason}]}
    if has_usage:
        yield answer | {"choices": [], "usage": usage}


def _tokens(session: Session, made: Response) -> list[tuple[str, float]]:
    texts = session.tokenizer.decode_batch(list(made.token_ids[:, None]))
    return list(zip(texts, made.logprobs.tolist(), strict=True))


def _answer(kind: str, name: str, model: str | None, choice: dict[str, Any], num_prompt_tokens: int, made: Response) -> dict[str, Any]:
    usage = {"prompt_tokens": num_prompt_tokens, "completion_tokens": len(made.token_ids)}
    usage["total_tokens"] = sum(usage.values())
    about = {"id": f"{kind}-{secrets.token_hex(12)}", "object": name, "created": int(time.time()), "model": model or "policy"}
    return about | {"choices": [choice], "usage": usage}
