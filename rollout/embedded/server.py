"""HTTP in front of the decode loop: SGLang's native endpoints."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from rollout.embedded.core import EngineCore, PauseMode
from rollout.embedded.loop import DecodeLoop
from rollout.embedded.model_weights import ModelWeights
from rollout.embedded.request import GenerateBody, RequestExpander
from rollout.embedded.response import answer
from rollout.embedded.sequence import Sequence
from rollout.embedded.settings import Settings
from slimebus.bus.errors import WeightsError

HEALTH_TIMEOUT_S = 20.0  # SGLang's: a health check that generates nothing for so long is a 503

T = TypeVar("T")
Answer = Callable[..., Awaitable[object]]
"""To the body of a POST, or to a GET: what is sent as JSON, or a response as it is."""

_encode = msgspec.json.Encoder().encode


class UpdateWeights(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of /update_weights_from_disk; `flush_cache` is taken and has no effect, for there is no prefix cache."""

    model_path: str
    weight_version: str | None = None
    flush_cache: bool = True


class Pause(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of /pause_generation."""

    mode: PauseMode = "abort"


class Abort(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of /abort_request."""

    rid: str = ""
    abort_all: bool = False


class Nothing(msgspec.Struct):
    """Body of /continue_generation."""


class QueueFull(Exception):
    """No room to wait in; the client may retry later."""


class EngineServer:
    """The request handlers and the sequences they wait for. Lives on the event loop; the decode loop has its own thread."""

    def __init__(self, settings: Settings, core: EngineCore, api_key: str) -> None:
        self._settings, self._core, self._api_key = settings, core, api_key
        self._expander = RequestExpander(core.model, core.tokenizer)
        self._model_path = settings.model_path
        self._waiters: dict[Sequence, asyncio.Future[dict[str, Any]]] = {}
        self._update_lock = asyncio.Lock()
        self._event_loop = asyncio.get_running_loop()
        self.failure: asyncio.Future[None] = self._event_loop.create_future()
        """Done, with what ended the decode thread, if that did."""
        self.decode_loop = DecodeLoop(core, self._report_from_thread, self._fail_from_thread)

    def application(self) -> web.Application:
        """The aiohttp application with every endpoint."""
        app = web.Application(client_max_size=256 * 1024 * 1024)
        posts: dict[str, tuple[type[msgspec.Struct], Answer]] = {
            "/generate": (GenerateBody, self.generate),
            "/abort_request": (Abort, self.abort_request),
            "/pause_generation": (Pause, self.pause_generation),
            "/continue_generation": (Nothing, self.continue_generation),
            "/update_weights_from_disk": (UpdateWeights, self.update_weights_from_disk),
        }
        gets: dict[str, Answer] = {
            "/ready": self.ready,
            "/ping": self.ping,
            "/health": self.health,
            "/health_generate": self.health,
            "/model_info": self.model_info,
            "/server_info": self.server_info,
        }
        app.add_routes([web.post(path, self._handler(answer, kind)) for path, (kind, answer) in posts.items()])
        app.add_routes([web.get(path, self._handler(answer)) for path, answer in gets.items()])
        return app

    def _handler(self, answer: Answer, kind: type[msgspec.Struct] | None = None) -> Callable[[web.Request], Awaitable[web.Response]]:
        """HTTP around an answer, with SGLang's key and errors: 401, 400 for what the request got wrong, 503 for a full queue.

        A control call is carried out to its end although its client has gone: cut off half-way it would leave locks and weights half-way.
        """

        async def handle(request: web.Request) -> web.Response:
            if not self._may_ask(request):
                return _json({"error": "Unauthorized"}, 401)
            try:
                work = answer(*([await _typed(request, kind)] if kind else []))
                found = await (work if kind is GenerateBody else asyncio.shield(work))
            except ValueError as error:
                return _json({"error": {"message": str(error)}}, 400)
            except QueueFull as error:
                return _json({"error": {"message": str(error)}}, 503)
            return found if isinstance(found, web.Response) else _json(found)

        return handle

    def _may_ask(self, request: web.Request) -> bool:
        """Each call but a health check carries the key, where there is one."""
        given = request.headers.get("Authorization", "").encode(errors="replace")
        is_open = not self._api_key or request.path.startswith("/health")
        return is_open or hmac.compare_digest(given, f"Bearer {self._api_key}".encode())

    # -- generation ----------------------------------------------------------------------------------------------

    async def generate(self, body: GenerateBody) -> object:
        """POST /generate."""
        sequences, is_single = self._expander.expand(body)
        waiters = self._admit(sequences)
        try:
            answers = await asyncio.gather(*waiters)
            return answers[0] if is_single else answers
        finally:
            self._forget(sequences)

    def _admit(self, sequences: list[Sequence]) -> list[asyncio.Future[dict[str, Any]]]:
        """Queue sequences on the decode thread; their answers to come. QueueFull counts those that other handlers wait for."""
        limit = self._settings.max_running_requests + self._settings.max_queued_requests
        if len(self._waiters) + len(sequences) > limit:
            raise QueueFull(f"{len(self._waiters)} sequences run or wait, {len(sequences)} more exceed the limit of {limit}; retry later")
        waiters = {sequence: self._event_loop.create_future() for sequence in sequences}
        self._waiters |= waiters
        self.decode_loop.call(lambda core: core.add(sequences))
        return list(waiters.values())

    def _forget(self, sequences: list[Sequence]) -> None:
        """Stop waiting; what has not finished (the client went away) is aborted."""
        unfinished = {sequence for sequence in sequences if sequence.finish_reason is None}
        for sequence in sequences:
            self._waiters.pop(sequence, None)
        if unfinished:
            self.decode_loop.call(lambda core: core.abort(unfinished.__contains__))

    def _report_from_thread(self, ended: list[Sequence]) -> None:
        self._event_loop.call_soon_threadsafe(self._deliver, ended)  # the decode thread does not pay for text

    def _deliver(self, ended: list[Sequence]) -> None:
        for sequence in ended:
            if (waiter := self._waiters.get(sequence)) is not None and not waiter.done():
                waiter.set_result(answer(sequence, self._core.tokenizer))

    def _fail_from_thread(self, error: BaseException) -> None:
        self._event_loop.call_soon_threadsafe(self.failure.set_exception, error)

    # -- control -------------------------------------------------------------------------------------------------

    async def _on_core(self, action: Callable[[EngineCore], T]) -> T:
        """What the action gives, run between two decode steps."""
        return await asyncio.wrap_future(self.decode_loop.call(action))

    async def abort_request(self, body: Abort) -> web.Response:
        """POST /abort_request: what starts with `rid`, or all, ends with what it has; 200 also when nothing matches, as SGLang."""

        def abort(core: EngineCore) -> None:
            self._report_from_thread(core.abort(lambda sequence: body.abort_all or sequence.matches(body.rid)))

        if body.abort_all or body.rid:
            await self._on_core(abort)
        return web.Response()

    async def pause_generation(self, body: Pause) -> object:
        """POST /pause_generation: abort ends what runs, retract puts it back in the queue, in_place freezes it."""
        await self._on_core(lambda core: self._report_from_thread(core.pause(body.mode)))
        return {"message": "Generation paused successfully.", "status": "ok"}

    async def continue_generation(self, body: Nothing) -> object:
        """POST /continue_generation."""
        await self._on_core(EngineCore.resume)
        return {"message": "Generation continued successfully.", "status": "ok"}

    async def update_weights_from_disk(self, body: UpdateWeights) -> object:
        """POST /update_weights_from_disk: read and check all, then swap between two decode steps."""
        async with self._update_lock:
            try:
                weights = await asyncio.to_thread(self._read_weights, Path(body.model_path))
            except WeightsError as error:
                return _json({"success": False, "message": error.text, "num_paused_requests": 0}, 400)
            await self._on_core(lambda core: core.swap_weights(weights, body.weight_version))
            self._model_path = Path(body.model_path)
        num_paused = len(self._core.scheduler.running) if self._core.is_paused else 0
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": num_paused}

    def _read_weights(self, path: Path) -> ModelWeights:
        return ModelWeights(path, self._core.model.config, old=self._core.model.weights)

    # -- state ---------------------------------------------------------------------------------------------------

    async def health(self) -> web.Response:
        """GET /health and /health_generate: 200 when the decode thread takes a turn and is not paused."""
        try:
            is_healthy = await asyncio.wait_for(self._on_core(lambda core: not core.is_paused), HEALTH_TIMEOUT_S)
        except TimeoutError:
            is_healthy = False
        return web.Response(status=200 if is_healthy else 503)

    async def ready(self) -> web.Response:
        """GET /ready: 200 unless paused."""
        return web.Response(status=503 if self._core.is_paused else 200)

    async def ping(self) -> web.Response:
        """GET /ping: 200, also when paused."""
        return web.Response()

    async def model_info(self) -> object:
        """GET /model_info."""
        started_with = str(self._settings.model_path)
        names = {"model_path": str(self._model_path), "served_model_name": started_with, "tokenizer_path": started_with}
        return names | {"is_generation": True, "weight_version": self._core.version}

    async def server_info(self) -> object:
        """GET /server_info: the settings, and the load in `internal_states`."""
        core = self._core
        about = msgspec.structs.asdict(self._settings) | {"model_path": str(self._settings.model_path), "version": "slimebus-cpu"}
        load = {
            "num_running_reqs": len(core.scheduler.running),
            "num_waiting_reqs": len(core.scheduler.waiting),
            "num_generated_tokens": core.num_generated,
            "is_paused": core.is_paused,
            "token_capacity": core.cache.budget_tokens,
        }
        return about | {"context_length": core.model.max_tokens, "weight_version": core.version, "internal_states": [load]}


async def _typed(request: web.Request, kind: type[msgspec.Struct]) -> msgspec.Struct:
    """The body. Raises ValueError for one that is malformed, or has a field that this engine could only ignore."""
    try:
        return msgspec.json.decode(await request.read() or b"{}", type=kind)
    except msgspec.DecodeError as error:
        known = ", ".join(field.name for field in msgspec.structs.fields(kind))
        raise ValueError(f"{error}; this engine takes {known}; for other fields of {request.path} use SGLang") from None


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=_encode(value), status=status, content_type="application/json")
