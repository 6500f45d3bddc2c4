"""HTTP in front of the decode loop: SGLang's native endpoints."""

import asyncio
import hmac
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from aiohttp import web

from rollout.embedded.core import EngineCore
from rollout.embedded.loop import DecodeLoop
from rollout.embedded.model_weights import ModelWeights
from rollout.embedded.request import GenerateBody, RequestExpander
from rollout.embedded.response import answer
from rollout.embedded.sequence import Sequence
from rollout.embedded.settings import Settings
from slimebus.bus.errors import WeightsError

HEALTH_TIMEOUT_S = 20.0  # SGLang's: a health check that generates nothing for so long is a 503

T = TypeVar("T")
Body = TypeVar("Body", bound=msgspec.Struct)

_encode = msgspec.json.Encoder().encode


class UpdateWeights(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of /update_weights_from_disk; known prefixes are forgotten whatever `flush_cache` says."""

    model_path: str
    weight_version: str | None = None
    flush_cache: bool = True


class Pause(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of /pause_generation."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class Abort(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of /abort_request."""

    rid: str = ""
    abort_all: bool = False


class QueueFull(Exception):
    """No room to wait in; the client may retry later."""


class EngineServer:
    """The request handlers and the sequences they wait for. Lives on the event loop; the decode loop has its own thread."""

    def __init__(self, settings: Settings, core: EngineCore, api_key: str) -> None:
        self._settings, self._core, self._api_key = settings, core, api_key
        self._expander = RequestExpander(core.model, core.tokenizer)
        self._model_path = settings.model_path
        self._waiters: dict[Sequence, asyncio.Queue[dict[str, Any]]] = {}
        self._update_lock = asyncio.Lock()
        self._event_loop = asyncio.get_running_loop()
        self.failure: asyncio.Future[None] = self._event_loop.create_future()
        """Done, with what ended the decode thread, if that did."""
        call = self._event_loop.call_soon_threadsafe
        self.decode_loop = DecodeLoop(core, self._report_from_thread, lambda error: call(self.failure.set_exception, error))

    def application(self) -> web.Application:
        """The aiohttp application; each endpoint has the name of its handler."""
        app = web.Application(client_max_size=256 * 1024 * 1024, middlewares=[self._check_key, _errors_as_json])
        control = (self.abort_request, self.pause_generation, self.continue_generation, self.update_weights_from_disk, self.flush_cache)
        state = (self.ready, self.ping, self.health, self.model_info, self.server_info)
        app.add_routes([web.post(f"/{handler.__name__}", handler) for handler in (self.generate, *control)])
        app.add_routes([web.get(f"/{handler.__name__}", handler) for handler in state])
        app.add_routes([web.get("/health_generate", self.health)])
        return app

    @web.middleware
    async def _check_key(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """SGLang's check: each call but a health check carries the key, where there is one."""
        given = request.headers.get("Authorization", "")
        is_open = not self._api_key or request.path.startswith("/health")
        if not is_open and not hmac.compare_digest(given.encode(errors="replace"), f"Bearer {self._api_key}".encode()):
            return _json({"error": "Unauthorized"}, 401)
        response: web.StreamResponse = await handler(request)
        return response

    # -- generation ----------------------------------------------------------------------------------------------

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """POST /generate."""
        body = await _typed(request, GenerateBody)
        sequences, is_single = self._expander.expand(body)
        answers = self._admit(sequences)
        try:
            if body.stream:
                return await self._stream(request, answers, {} if is_single else {one.rid: i for i, one in enumerate(sequences)})
            found = {one["meta_info"]["id"]: one for one in [await answers.get() for _ in sequences]}
            ordered = [found[sequence.rid] for sequence in sequences]
            return _json(ordered[0] if is_single else ordered)
        finally:
            self._forget(sequences)

    def _admit(self, sequences: list[Sequence]) -> asyncio.Queue[dict[str, Any]]:
        """Queue sequences on the decode thread; where their answers come. QueueFull counts those that other handlers wait for."""
        limit = self._settings.max_running_requests + self._settings.max_queued_requests
        if len(self._waiters) + len(sequences) > limit:
            raise QueueFull(f"{len(self._waiters)} sequences run or wait, {len(sequences)} more exceed the limit of {limit}; retry later")
        answers: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._waiters |= dict.fromkeys(sequences, answers)
        self.decode_loop.call(lambda core: core.add(sequences))
        return answers

    def _forget(self, sequences: list[Sequence]) -> None:
        """Stop waiting; what has not finished (the client went away) is aborted."""
        unfinished = {sequence for sequence in sequences if sequence.finish_reason is None}
        for sequence in sequences:
            self._waiters.pop(sequence, None)
        if unfinished:
            self.decode_loop.call(lambda core: core.abort(unfinished.__contains__))

    async def _stream(self, request: web.Request, answers: asyncio.Queue[dict[str, Any]], index_of: dict[str, int]) -> web.StreamResponse:
        """Cumulative answers as they come, in any order of the sequences. index_of: of a batch, the index of each id."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        num_open = len(index_of) or 1
        while num_open:
            chunk = await answers.get()
            num_open -= chunk["meta_info"]["finish_reason"] is not None
            about = {"index": index_of[chunk["meta_info"]["id"]]} if index_of else {}
            await response.write(b"data: " + _encode(chunk | about) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    def _report_from_thread(self, sequences: list[Sequence]) -> None:
        # A growing sequence goes on changing: its answer is made here, before the next step. A finished one is made
        # on the event loop, so that the decode thread does not pay for text.
        chunks = [(sequence, None if sequence.finish_reason else answer(sequence, self._core.tokenizer)) for sequence in sequences]
        self._event_loop.call_soon_threadsafe(self._deliver, chunks)

    def _deliver(self, chunks: list[tuple[Sequence, dict[str, Any] | None]]) -> None:
        for sequence, chunk in chunks:
            if (waiter := self._waiters.get(sequence)) is not None:
                waiter.put_nowait(chunk or answer(sequence, self._core.tokenizer))

    # -- control -------------------------------------------------------------------------------------------------

    async def _on_core(self, action: Callable[[EngineCore], T]) -> T:
        """What the action gives, run between two decode steps."""
        return await asyncio.wrap_future(self.decode_loop.call(action))

    async def abort_request(self, request: web.Request) -> web.Response:
        """POST /abort_request: what starts with `rid`, or all, ends with what it has; 200 also when nothing matches, as SGLang."""
        body = await _typed(request, Abort)

        def abort(core: EngineCore) -> None:
            self._report_from_thread(core.abort(lambda sequence: body.abort_all or sequence.rid.startswith(body.rid)))

        if body.abort_all or body.rid:
            await self._on_core(abort)
        return web.Response()

    async def pause_generation(self, request: web.Request) -> web.Response:
        """POST /pause_generation: abort ends what runs, retract puts it back in the queue, in_place freezes it."""
        mode = (await _typed(request, Pause)).mode

        def pause(core: EngineCore) -> None:
            core.is_paused = True
            if mode == "abort":
                self._report_from_thread(core.abort(lambda _: True))
            if mode == "retract":
                core.retract()

        await self._on_core(pause)
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, request: web.Request) -> web.Response:
        """POST /continue_generation."""

        def resume(core: EngineCore) -> None:
            core.is_paused = False

        await self._on_core(resume)
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    async def update_weights_from_disk(self, request: web.Request) -> web.Response:
        """POST /update_weights_from_disk: read and check all, then swap between two decode steps."""
        body = await _typed(request, UpdateWeights)
        async with self._update_lock:
            try:
                weights = await asyncio.to_thread(self._read_weights, Path(body.model_path))
            except WeightsError as error:
                return _json({"success": False, "message": error.text, "num_paused_requests": 0}, 400)
            await self._on_core(lambda core: core.swap_weights(weights, body.weight_version))
            self._model_path = Path(body.model_path)
        num_paused = len(self._core.scheduler.running) if self._core.is_paused else 0
        return _json({"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": num_paused})

    async def flush_cache(self, request: web.Request) -> web.Response:
        """POST /flush_cache: forget known prefixes; 400 while a sequence runs or waits, as SGLang."""

        def flush(core: EngineCore) -> None:
            if core.scheduler.running or core.scheduler.waiting:
                raise ValueError("Cache not flushed because there are pending requests.")
            core.cache.flush()

        await self._on_core(flush)
        return web.Response(text="Cache flushed.")

    def _read_weights(self, path: Path) -> ModelWeights:
        served = self._core.model.weights
        return ModelWeights(path, self._core.model.config, served.embedding.dtype, old=served)

    # -- state ---------------------------------------------------------------------------------------------------

    async def health(self, request: web.Request) -> web.Response:
        """GET /health and /health_generate: 200 when the decode thread takes a turn and is not paused."""
        try:
            is_healthy = await asyncio.wait_for(self._on_core(lambda core: not core.is_paused), HEALTH_TIMEOUT_S)
        except TimeoutError:
            is_healthy = False
        return web.Response(status=200 if is_healthy else 503)

    async def ready(self, request: web.Request) -> web.Response:
        """GET /ready: 200 unless paused."""
        return web.Response(status=503 if self._core.is_paused else 200)

    async def ping(self, request: web.Request) -> web.Response:
        """GET /ping: 200, also when paused."""
        return web.Response()

    async def model_info(self, request: web.Request) -> web.Response:
        """GET /model_info."""
        started_with = str(self._settings.model_path)
        names = {"model_path": str(self._model_path), "served_model_name": started_with, "tokenizer_path": started_with}
        return _json(names | {"is_generation": True, "weight_version": self._core.version})

    async def server_info(self, request: web.Request) -> web.Response:
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
        return _json(about | {"context_length": core.model.max_tokens, "weight_version": core.version, "internal_states": [load]})


async def _typed(request: web.Request, kind: type[Body]) -> Body:
    """The body. Raises ValueError for one that is malformed, or has a field that this engine could only ignore."""
    try:
        return msgspec.json.decode(await request.read() or b"{}", type=kind)
    except msgspec.DecodeError as error:
        known = ", ".join(field.name for field in msgspec.structs.fields(kind))
        raise ValueError(f"{error}; this engine takes {known}; for other fields of {request.path} use SGLang") from None


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=_encode(value), status=status, content_type="application/json")


@web.middleware
async def _errors_as_json(request: web.Request, handler: Any) -> web.StreamResponse:
    """SGLang's error shape, `{"error": {"message"}}`: 400 for what the request got wrong, 503 for a full queue.

    A control call is carried out to its end although its client has gone: cut off half-way it would leave locks and weights half-way.
    """
    try:
        work = handler(request)
        response: web.StreamResponse = await (work if request.path == "/generate" else asyncio.shield(work))
    except ValueError as error:
        return _json({"error": {"message": str(error)}}, 400)
    except QueueFull as error:
        return _json({"error": {"message": str(error)}}, 503)
    return response
