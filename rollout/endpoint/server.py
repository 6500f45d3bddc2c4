"""The endpoint of a worker: HTTP on one side, sessions on the other. It tokenises and records nothing: that is the session's.

an agent of ours        its key names its session
an agent from outside   the endpoint's key, and a header X-Session-Id: the first request of an id takes a session that waits
"""

import asyncio
import contextlib
import hmac
import inspect
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from typing import Any
from weakref import WeakValueDictionary

import msgspec
from aiohttp import web
from jinja2 import TemplateError

from rollout.endpoint.chat import ChatRequest, TextRequest, chat_answer, chunks, plain_message, text_answer
from rollout.endpoint.tool_calls import parse, parse_by_sglang
from rollout.samples.partials import Unfinished
from rollout.samples.response import reward_number
from rollout.samples.session import Session
from slimebus.bus.errors import SlimebusError, UsageError

log = logging.getLogger("rollout")

SESSION_HEADER = "X-Session-Id"
WAIT_S = 20.0
"""How long a request waits for a session to take; openai's client tries again after a 503."""

POLL_S = 1.0

Judge = Callable[[Session, list[dict[str, Any]]], Any]

encode = msgspec.json.Encoder().encode


class Refused(Exception):
    """An answer with this status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Seat:
    """A session that an agent has, under a name, or may have. key: of an agent of ours, which is then its name."""

    def __init__(self, session: Session, key: str = "") -> None:
        self.session, self.name, self.key = session, key, key
        self.ended, self.turn = asyncio.Event(), asyncio.Lock()
        self.used_at = 0.0

    async def wait(self, idle_s: float) -> None:
        """Until it ended, or nobody has used it for so long since somebody had it."""
        while not self.ended.is_set():
            is_idle = self.name and not self.turn.locked()
            left = self.used_at + idle_s - time.monotonic() if is_idle else idle_s
            if left <= 0:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ended.wait(), min(POLL_S, left))


class Endpoint:
    """Serves until `close`. judge: called with a session and the messages of its next request, may give its reward."""

    def __init__(self, *, key: str = "", tool_call_parser: str = "", judge: Judge | None = None) -> None:
        """key: of agents from outside, empty: none is asked for. tool_call_parser: the name of SGLang's; empty: the small one here."""
        self._key, self._parser, self._judge = key, tool_call_parser, judge
        self._seats: dict[str, Seat] = {}
        self._free: asyncio.Queue[Seat] = asyncio.Queue()
        self._claiming: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._runner: web.AppRunner | None = None
        self.base_url = ""

    async def start(self, host: str, port: int) -> None:
        """Listen; port 0 takes a free one. Raises OSError."""
        app = web.Application(client_max_size=64 << 20, middlewares=[errors_as_json])
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
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        bound = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        self.base_url = f"http://{host}:{bound}/v1"
        log.info("agents reach the policy at %s", self.base_url)

    async def close(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    def open(self, session: Session, name: str = "") -> Seat:
        """Give it to an agent of ours; the seat's name is the agent's key. name: one that it sends as its session id instead."""
        seat = Seat(session, "" if name else f"sk-{secrets.token_urlsafe(24)}")
        seat.name = seat.name or name
        self._seats[seat.name] = seat
        return seat

    def offer(self, session: Session) -> Seat:
        """Let an agent from outside take it."""
        self._free.put_nowait(seat := Seat(session))
        return seat

    def take_back(self, seat: Seat) -> None:
        """Nobody has it any more, or can have it."""
        seat.ended.set()
        if self._seats.get(seat.name) is seat:
            del self._seats[seat.name]

    # --- requests ---

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions: the messages are what the policy is to see; what of them is new is added to the record."""
        body = msgspec.json.decode(await request.read(), type=ChatRequest)
        messages = [plain_message(message) for message in body.messages]
        async with self._turn(request) as session:
            await self._ask_judge(session, messages)
            made = await session.generate(messages, tools=body.tools or [], **body.sampling(session))
            message: dict[str, Any] = {"role": "assistant", "content": made.text}
            if body.tools and body.tool_choice != "none":
                content, calls = await self._calls(session, made.text, body.tools)
                message |= {"content": content, "tool_calls": calls} if calls else {}
            session.messages[-1:] = [message]
            num_prompt_tokens = len(session.token_ids) - len(made.token_ids)
        return await self._send(request, body, chat_answer(session, made, message, body, num_prompt_tokens))

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions: a text that begins as the record reads goes on from the record, and is not tokenised again."""
        body = msgspec.json.decode(await request.read(), type=TextRequest)
        given: Any = body.prompt
        if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str):
            given = given[0]
        async with self._turn(request) as session:
            if isinstance(given, str):
                known = session.tokenizer.decode(session.token_ids)
                held = session.token_ids.tolist() if given.startswith(known) else []
                given = [*held, *session.tokenizer.encode(given[len(known) if held else 0 :]).tolist()]
            made = await session.generate(given, **body.sampling(session))
            num_prompt_tokens = len(session.token_ids) - len(made.token_ids)
        return await self._send(request, body, text_answer(session, made, body, num_prompt_tokens))

    async def models(self, request: web.Request) -> web.Response:
        """GET /v1/models: the policy, under any name that a request gives."""
        policy = {"id": "policy", "object": "model", "created": 0, "owned_by": "slimebus"}
        return web.Response(body=encode({"object": "list", "data": [policy]}), content_type="application/json")

    async def begin(self, request: web.Request) -> web.Response:
        """POST /v1/sessions: take a session, and learn what its task is."""
        self._check_key(request)
        name = secrets.token_hex(8)
        task = (await self._claim(name, request)).session.task
        about = {"id": name, "prompt": task.prompt, "label": task.label, "metadata": task.metadata, "tools": task.metadata.get("tools")}
        return web.Response(body=encode(about), content_type="application/json")

    async def reward(self, request: web.Request) -> web.Response:
        """POST /v1/sessions/ID/reward {"reward": number}: what it was worth; it ends."""
        found = reward_number("reward", msgspec.json.decode(await request.read(), type=dict[str, float]).get("reward"))
        seat = self._known(request)  # after the last await: the next agent may have the session by then
        seat.session.reward = found
        seat.ended.set()
        return web.Response()

    async def end(self, request: web.Request) -> web.Response:
        """DELETE /v1/sessions/ID: it ends; the run's reward function says what it was worth."""
        self._known(request).ended.set()
        return web.Response()

    # --- the session of a request ---

    def _bearer(self, request: web.Request) -> str:
        return request.headers.get("Authorization", "").removeprefix("Bearer ")

    def _check_key(self, request: web.Request) -> None:
        if self._key and not hmac.compare_digest(self._bearer(request).encode(), self._key.encode()):
            raise Refused(401, "this key is not the endpoint's")

    async def _seat(self, request: web.Request) -> Seat:
        seat = self._seats.get(self._bearer(request))
        if seat is not None and seat.key:
            return seat
        self._check_key(request)
        if not (name := request.headers.get(SESSION_HEADER, "")):
            raise Refused(401, f"neither the key of a session nor a header {SESSION_HEADER}")
        return self._seats.get(name) or await self._claim(name, request)

    @contextlib.asynccontextmanager
    async def _turn(self, request: web.Request) -> AsyncIterator[Session]:
        """The session of this request, for it alone."""
        seat = await self._seat(request)
        async with seat.turn:
            if seat.ended.is_set():  # perhaps while this waited
                raise Refused(410, "this session has ended")
            try:
                yield seat.session
            finally:
                seat.used_at = time.monotonic()

    def _known(self, request: web.Request) -> Seat:
        self._check_key(request)
        if (seat := self._seats.get(request.match_info["id"])) is None:
            raise Refused(404, "there is no such session, or it has ended")
        return seat

    async def _claim(self, name: str, request: web.Request) -> Seat:
        try:
            async with asyncio.timeout(WAIT_S), self._claiming.setdefault(name, asyncio.Lock()):
                if name in self._seats:  # of two first requests one takes a session
                    return self._seats[name]
                while (seat := await self._free.get()).ended.is_set():
                    pass
        except TimeoutError:
            raise Refused(503, "no session is free; the run waits for a step, or all are in use") from None
        if request.transport is None or request.transport.is_closing():
            self._free.put_nowait(seat)
            raise Refused(503, "who asked for a session has left")
        seat.name, seat.used_at = name, time.monotonic()
        self._seats[name] = seat
        return seat

    # --- what a turn needs besides ---

    async def _ask_judge(self, session: Session, messages: list[dict[str, Any]]) -> None:
        if self._judge is None or not session.text:
            return
        found = self._judge(session, messages)
        found = await found if inspect.isawaitable(found) else found
        session.reward = session.reward if found is None else reward_number("judge", found)

    async def _calls(self, session: Session, text: str, tools: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
        if not self._parser:
            return parse(text)
        assert session.engines is not None  # it made a turn
        return await parse_by_sglang(session.engines.pool.engines_of("")[0].client, self._parser, text, tools)

    async def _send(self, request: web.Request, body: ChatRequest | TextRequest, answer: dict[str, Any]) -> web.StreamResponse:
        if not body.stream:
            return web.Response(body=encode(answer), content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for chunk in chunks(answer, has_usage=bool((body.stream_options or {}).get("include_usage"))):
            await response.write(b"data: " + encode(chunk) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


@web.middleware
async def errors_as_json(request: web.Request, handler: Any) -> web.StreamResponse:
    """OpenAI's error shape: 400 for what the request got wrong, 503 for what the engines did."""
    try:
        response: web.StreamResponse = await handler(request)
        return response
    except Refused as bad:
        status, text = bad.status, str(bad)
    except (UsageError, msgspec.MsgspecError, ValueError, TypeError, RecursionError, TemplateError) as bad:
        status, text = 400, str(bad)
    except (SlimebusError, Unfinished) as bad:
        status, text = 503, str(bad)
    error = {"message": text, "type": "invalid_request_error" if status < 500 else "server_error", "param": None, "code": None}
    return web.Response(body=encode({"error": error}), status=status, content_type="application/json")
