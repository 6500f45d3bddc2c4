"""The endpoint of a worker: HTTP on one side, sessions on the other. It tokenises and records nothing: that is the session's.

an agent of ours        its key names its session
an agent from outside   the endpoint's key, and a header X-Session-Id: the first request of an id takes a session that waits
"""

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import msgspec
from aiohttp import web
from jinja2 import TemplateError

from rollout.endpoint.chat import (
    REFUSED,
    WITHOUT_EFFECT,
    ChatRequest,
    TextRequest,
    chat_answer,
    chunks,
    parse,
    parse_by_sglang,
    plain_message,
    text_answer,
)
from rollout.samples.partials import Unfinished
from rollout.samples.plugins import Plugin, PluginError
from rollout.samples.response import Response, reward_number
from rollout.samples.session import Session, without_stop
from slimebus.bus.errors import SlimebusError, UsageError

log = logging.getLogger("rollout")
Body = TypeVar("Body", ChatRequest, TextRequest)

SESSION_HEADER = "X-Session-Id"
WAIT_S = 20.0
"""How long a request waits for a session to take; openai's client tries again after a 503."""
KEEP_ALIVE_S = 15.0
"""A stream whose reply is not there yet sends a comment as often: clients take silence for a lost connection."""
JUDGE_S = 60.0
"""Of a call of judge."""
ANYWHERE = ("", "0.0.0.0", "::")
TOO_LONG = "This model's maximum context length is {} tokens. However, your messages resulted in {} tokens. Please reduce their length."
"""In OpenAI's words, which agents look for."""

encode = msgspec.json.Encoder().encode


class Refused(Exception):
    """An answer with this status. code: of OpenAI's."""

    def __init__(self, status: int, text: str, code: str | None = None) -> None:
        super().__init__(text)
        self.status, self.code = status, code


class SessionSlot:
    """A session that an agent has, under a name, or may have. key: of an agent of ours, which is then its name."""

    def __init__(self, session: Session, key: str = "") -> None:
        self.session, self.name, self.key = session, key, key
        self.ended, self.turn = asyncio.Event(), asyncio.Lock()
        self.used_at = 0.0
        self.judging: asyncio.Task[None] | None = None
        """The last call of judge, which waits for those before it."""
        self.is_rewarded = False

    async def wait(self, idle_s: float) -> None:
        """Until it ended, or nobody has used it for so long since somebody had it."""
        while not self.ended.is_set():
            is_idle = self.name and not self.turn.locked()
            if (left_s := self.used_at + idle_s - time.monotonic() if is_idle else idle_s) <= 0:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ended.wait(), left_s)


class Endpoint:
    """Serves until `close`. judge: called with a session and the messages of its next request, may give its reward."""

    def __init__(self, *, key: str = "", tool_call_parser: str = "", judge: Plugin | None = None) -> None:
        """key: of agents from outside, empty: none is asked for. tool_call_parser: the name of SGLang's; empty: the small one here."""
        self._key, self._parser, self._judge = key, tool_call_parser, judge
        self._slots: dict[str, SessionSlot] = {}
        self._free: deque[SessionSlot] = deque()
        self._published = asyncio.Event()
        self._claiming: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._runner: web.AppRunner | None = None
        self._without_effect = Counter[str]()
        self.base_url = ""

    async def start(self, host: str, port: int) -> None:
        """Listen; port 0 takes a free one. Raises OSError."""
        app = web.Application(client_max_size=64 << 20, middlewares=[_errors_as_json])
        app.add_routes(
            [
                web.post("/v1/chat/completions", self.chat),
                web.post("/v1/completions", self.complete),
                web.get("/v1/models", self.models),
                web.post("/v1/sessions", self.begin),
                web.post("/v1/sessions/{id}/reward", self.reward),
                web.delete("/v1/sessions/{id}", self.end),
            ]
        )
        # A request whose client has left is cancelled, at the engine too: what nobody got is not trained.
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        bound = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        self.base_url = f"http://{socket.gethostname() if host in ANYWHERE else host}:{bound}/v1"
        log.info("agents reach the policy at %s", self.base_url)

    async def close(self) -> None:
        """Stop listening."""
        if self._without_effect:
            log.info("fields of requests without effect: %s", ", ".join(f"{name} ({n})" for name, n in self._without_effect.items()))
        if self._runner is not None:
            await self._runner.cleanup()

    def open(self, session: Session, name: str = "") -> SessionSlot:
        """Give it to an agent of ours; the slot's name is the agent's key. name: one that it sends as its session id instead."""
        slot = SessionSlot(session, "" if name else f"sk-{secrets.token_urlsafe(24)}")
        slot.name = slot.name or name
        self._slots[slot.name] = slot
        return slot

    def publish(self, session: Session) -> SessionSlot:
        """Let an agent from outside take it; until then no time of it passes."""
        self._free.append(slot := SessionSlot(session))
        session.is_waiting = True
        self._published.set()
        return slot

    def release(self, slot: SessionSlot) -> None:
        """Nobody has it any more, or can have it."""
        slot.ended.set()
        slot.session.is_waiting = False
        if slot in self._free:
            self._free.remove(slot)
        if self._slots.get(slot.name) is slot:
            del self._slots[slot.name]

    # --- requests ---

    async def _body(self, request: web.Request, kind: type[Body]) -> Body:
        """What it asks for; fields without effect are counted, and logged at first."""
        given = msgspec.json.decode(await request.read(), type=dict[str, Any])
        forced = {"tool_choice"} if given.get("tool_choice") not in (None, "auto", "none") else set()
        for name in given.keys() - {field.name for field in msgspec.structs.fields(kind)} | forced:
            self._without_effect[name] += 1
            if self._without_effect[name] == 1:
                log.info("a request's field %r %s", name, WITHOUT_EFFECT)
        return msgspec.convert(given, kind)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions: the messages are what the policy is to see; what of them is new is added to the record."""
        body = await self._body(request, ChatRequest)
        return await self._send_answer(request, body, self._chat(request, body, [plain_message(message) for message in body.messages]))

    async def _chat(self, request: web.Request, body: ChatRequest, messages: list[dict[str, Any]]) -> dict[str, Any]:
        async with self._hold_session(request) as slot:
            session = slot.session
            if self._judge is not None and session.text:
                slot.judging = asyncio.create_task(self._ask_judge(slot, session.snapshot(), messages, slot.judging))
            made = _checked(session, await session.generate(messages, tools=body.tools or [], **body.sampling(session)))
            message: dict[str, Any] = {"role": "assistant", "content": made.text}
            if body.tools and body.tool_choice != "none":
                content, calls = await self._calls(session, made, body.tools)
                message |= {"content": content, "tool_calls": calls} if calls else {}
            session.messages[-1:] = [message]
            num_prompt_tokens = len(session.token_ids) - len(made.token_ids)
        return chat_answer(session, made, message, body, num_prompt_tokens)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions: a text that begins as the record reads goes on from the record, and is not tokenised again."""
        body = await self._body(request, TextRequest)
        return await self._send_answer(request, body, self._complete(request, body))

    async def _complete(self, request: web.Request, body: TextRequest) -> dict[str, Any]:
        given: Any = body.prompt
        if isinstance(given, list) and len(given) == 1 and not isinstance(given[0], int):
            (given,) = given
        async with self._hold_session(request) as slot:
            session = slot.session
            made = _checked(session, await session.generate(_continued(session, given), **body.sampling(session)))
            num_prompt_tokens = len(session.token_ids) - len(made.token_ids)
        return text_answer(session, made, body, num_prompt_tokens)

    async def models(self, request: web.Request) -> web.Response:
        """GET /v1/models: the policy, under any name that a request gives."""
        policy = {"id": "policy", "object": "model", "created": 0, "owned_by": "slimebus"}
        return _json({"object": "list", "data": [policy]})

    async def begin(self, request: web.Request) -> web.Response:
        """POST /v1/sessions: take a session, and learn what its task is."""
        self._check_key(request)
        name = secrets.token_hex(8)
        task = (await self._claim_session(name)).session.task
        about = {"id": name, "prompt": task.prompt, "label": task.label, "metadata": task.metadata, "tools": task.metadata.get("tools")}
        return _json(about)

    async def reward(self, request: web.Request) -> web.Response:
        """POST /v1/sessions/ID/reward {"reward": number}: what it was worth; it ends."""
        found = reward_number("reward", msgspec.json.decode(await request.read(), type=dict[str, float]).get("reward"))
        slot = self._find_slot(request)  # after the last await: the next agent may have the session by then
        slot.session.reward, slot.is_rewarded = found, True
        slot.ended.set()
        return web.Response()

    async def end(self, request: web.Request) -> web.Response:
        """DELETE /v1/sessions/ID: it ends; the run's reward function says what it was worth."""
        self._find_slot(request).ended.set()
        return web.Response()

    # --- the session of a request ---

    def _bearer(self, request: web.Request) -> str:
        return request.headers.get("Authorization", "").removeprefix("Bearer ")

    def _check_key(self, request: web.Request) -> None:
        if self._key and not hmac.compare_digest(self._bearer(request).encode(), self._key.encode()):
            raise Refused(401, "this key is not the endpoint's")

    async def _slot_of(self, request: web.Request) -> SessionSlot:
        slot = self._slots.get(self._bearer(request))
        if slot is not None and slot.key:
            return slot
        self._check_key(request)
        if not (name := request.headers.get(SESSION_HEADER, "")):
            raise Refused(401, f"neither the key of a session nor a header {SESSION_HEADER}")
        return self._slots.get(name) or await self._claim_session(name)

    @contextlib.asynccontextmanager
    async def _hold_session(self, request: web.Request) -> AsyncIterator[SessionSlot]:
        """The session of this request, for it alone. Of a turn that is refused, or whose client has left, nothing stays."""
        slot = await self._slot_of(request)
        async with slot.turn:
            if slot.ended.is_set():  # perhaps while this waited
                raise Refused(410, "this session has ended")
            before = slot.session.snapshot()
            try:
                yield slot
            except (asyncio.CancelledError, Refused):
                slot.session.restore(before)
                raise
            finally:
                slot.used_at = time.monotonic()

    def _find_slot(self, request: web.Request) -> SessionSlot:
        self._check_key(request)
        if (slot := self._slots.get(request.match_info["id"])) is None:
            raise Refused(404, "there is no such session, or it has ended")
        return slot

    async def _claim_session(self, name: str) -> SessionSlot:
        try:
            async with asyncio.timeout(WAIT_S), self._claiming.setdefault(name, asyncio.Lock()):
                if name in self._slots:  # of two first requests one takes a session
                    return self._slots[name]
                while not self._free:
                    self._published.clear()
                    await self._published.wait()
        except TimeoutError:
            raise Refused(503, "no session is free; the run waits for a step, or all are in use") from None
        self._slots[name] = slot = self._free.popleft()
        slot.name, slot.used_at = name, time.monotonic()
        slot.session.is_waiting, slot.session.began_at = False, time.monotonic()
        return slot

    # --- what a turn needs besides ---

    async def _ask_judge(
        self, slot: SessionSlot, seen: Session, messages: list[dict[str, Any]], before: "asyncio.Task[None] | None"
    ) -> None:
        """Beside the turn, after the call `before`: neither the turn nor another session waits for what a judge does."""
        judge = self._judge
        assert judge is not None
        if before is not None:
            await before
        try:
            found = await judge(seen, messages, timeout_s=JUDGE_S, limit="the limit")
            if found is not None and not slot.is_rewarded:
                slot.session.reward = reward_number(judge.name, found)
        except (PluginError, ValueError, TypeError) as bad:
            log.error("session %s: %s", slot.session.id, bad)

    async def _calls(self, session: Session, made: Response, tools: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
        if not self._parser:
            return parse(made.text)
        assert session.engines is not None  # it made a turn
        client = session.engines.pool.engines_of("")[0].client
        return await parse_by_sglang(client, self._parser, _with_marks(session, made), tools)

    async def _send_answer(
        self, request: web.Request, body: ChatRequest | TextRequest, work: Awaitable[dict[str, Any]]
    ) -> web.StreamResponse:
        """The answer that this work gives; a stream has it in one piece, and comments until then."""
        if not body.stream:
            return _json(await work)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=KEEP_ALIVE_S))[0]:
                if not response.prepared:
                    await response.prepare(request)
                await response.write(b": the reply is not there yet\n\n")
            if not response.prepared:
                task.result()  # what went wrong until now has a status of its own
                await response.prepare(request)
            try:
                parts = list(chunks(task.result(), has_usage=bool((body.stream_options or {}).get("include_usage"))))
            except Exception as bad:  # noqa: BLE001  as a status would say
                parts = [_error(bad)[1]]
            for part in parts:
                await response.write(b"data: " + encode(part) + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
            return response
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _checked(session: Session, made: Response) -> Response:
    """A turn; where there was no room for it, the refusal on which agents shorten their context."""
    if made.finish_reason == "length" and not len(made.token_ids):
        assert made.prompt_ids is not None
        raise Refused(400, TOO_LONG.format(session.max_context_len, len(made.prompt_ids)), "context_length_exceeded")
    return made


def _continued(session: Session, given: str | list[int]) -> list[int]:
    """The token ids of a text: those of the record where it begins as the record reads, with its marks or without them."""
    if not isinstance(given, str):
        return given
    ids, decode = session.token_ids, session.tokenizer.decode
    for known in (decode(ids, skip_special_tokens=False), decode(ids[:-1], skip_special_tokens=False) + decode(ids[-1:]), decode(ids)):
        if given.startswith(known):
            return [*ids.tolist(), *session.tokenizer.encode(given[len(known) :]).tolist()]
    return session.tokenizer.encode(given).tolist()


def _with_marks(session: Session, made: Response) -> str:
    """The reply with its special tokens, which are the marks of calls for some models; without the one that ended it."""
    decode, last = session.tokenizer.decode, made.token_ids[-1:]
    text = decode(made.token_ids, skip_special_tokens=False)
    is_end = made.finish_reason == "stop" and not decode(last)
    return without_stop(text.removesuffix(decode(last, skip_special_tokens=False)) if is_end else text, made)


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=encode(value), status=status, content_type="application/json")


def _error(bad: Exception) -> tuple[int, dict[str, Any]]:
    """In OpenAI's shape, with its status: 400 for what the request got wrong, 503 for what the engines did. Raises what is neither."""
    match bad:
        case Refused():
            status, code = bad.status, bad.code
        case msgspec.ValidationError():
            bad, status, code = ValueError(f"{bad}; {REFUSED}"), 400, None
        case UsageError() | msgspec.MsgspecError() | ValueError() | TypeError() | RecursionError() | TemplateError():
            status, code = 400, None
        case SlimebusError() | Unfinished():
            status, code = 503, None
        case _:
            raise bad
    kind = "invalid_request_error" if status < 500 else "server_error"
    return status, {"error": {"message": str(bad), "type": kind, "param": None, "code": code}}


@web.middleware
async def _errors_as_json(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        response: web.StreamResponse = await handler(request)
        return response
    except web.HTTPException:
        raise
    except Exception as bad:  # noqa: BLE001  raised again where it is no answer
        status, error = _error(bad)
        return _json(error, status)
