"""HTTP in front of the decode loop: SGLang's native endpoints."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from rollout.engine.core import EngineCore
from rollout.engine.loop import DecodeLoop
from rollout.engine.model_weights import ModelWeights
from rollout.engine.request import Expanded, GenerateBody, RequestExpander
from rollout.engine.response import answer
from rollout.engine.sequence import Sequence
from rollout.engine.settings import Settings
from rollout.engine.text import TextCodec
from slimebus.errors import WeightsError
from slimebus.weights.tensors import version_digest

HEALTH_TIMEOUT_S = 20.0  # SGLang's: a health check that generates nothing for so long is a 503

_ALONE = {"role": "target", "rank": 0, "size": 1, "tp_rank": 0, "tp_size": 1, "dp_rank": 0, "dp_size": 1, "pp_rank": 0, "pp_size": 1}

_encode = msgspec.json.Encoder().encode
_decode_body = msgspec.json.Decoder(GenerateBody).decode


class UpdateWeights(msgspec.Struct, kw_only=True):
    """Body of /update_weights_from_disk; `flush_cache` is taken and has no effect, for there is no prefix cache."""

    model_path: str
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class UpdateVersion(msgspec.Struct, kw_only=True):
    """Body of /update_weight_version."""

    new_version: str
    abort_all_requests: bool = False


class CheckWeights(msgspec.Struct, kw_only=True):
    """Body of /weights_checker. skip_tensor_list: parts of names that are left out."""

    action: str = "checksum"
    skip_tensor_list: list[str] = []


class Pause(msgspec.Struct, kw_only=True):
    """Body of /pause_generation."""

    mode: str = "abort"


class Abort(msgspec.Struct, kw_only=True):
    """Body of /abort_request."""

    rid: str | None = None
    abort_all: bool = False


class QueueFull(Exception):
    """No room to wait in; the client may retry later."""


class EngineServer:
    """The request handlers and the sequences they wait for. Lives on the event loop; the decode loop has its own thread."""

    def __init__(self, settings: Settings, core: EngineCore, expander: RequestExpander, codec: TextCodec | None) -> None:
        self._settings, self._expander, self._codec = settings, expander, codec
        self._model_path = settings.model_path
        self._waiters: dict[Sequence, asyncio.Queue[dict[str, Any]]] = {}
        self._update_lock = asyncio.Lock()
        self._event_loop = asyncio.get_running_loop()
        self.failure: asyncio.Future[None] = self._event_loop.create_future()
        self._core = core
        self.decode_loop = DecodeLoop(core, self._tell_from_thread, self._fail_from_thread)

    def application(self) -> web.Application:
        """The aiohttp application with every endpoint."""
        app = web.Application(client_max_size=256 * 1024 * 1024, middlewares=[_errors_as_json])
        app.add_routes(
            [
                web.post("/generate", self.generate),
                web.post("/abort_request", self.abort_request),
                web.post("/pause_generation", self.pause_generation),
                web.post("/continue_generation", self.continue_generation),
                web.post("/update_weights_from_disk", self.update_weights_from_disk),
                web.post("/update_weight_version", self.update_weight_version),
                web.route("*", "/weights_checker", self.weights_checker),
                web.route("*", "/flush_cache", self.flush_cache),
                web.get("/ready", self.ready),
                web.get("/ping", self.ping),
                web.get("/v1/models", self.models),
            ]
        )
        for path, handler in {"health": self.health, "health_generate": self.health}.items():
            app.router.add_get(f"/{path}", handler)
        for name, handler in {"model_info": self.model_info, "server_info": self.server_info}.items():
            app.router.add_get(f"/{name}", handler)
            app.router.add_get(f"/get_{name}", handler)
        return app

    # -- generation ----------------------------------------------------------------------------------------------

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """POST /generate."""
        try:
            body = _decode_body(await request.read())
        except msgspec.DecodeError as error:
            return _json({"error": str(error)}, 400)
        expanded = self._expander.expand(body)
        self._admit(expanded.sequences)
        try:
            if body.stream:
                return await self._stream(request, expanded)
            answers = [await self._final(sequence) for sequence in expanded.sequences]
            return _json(answers[0] if expanded.is_single else answers)
        finally:
            self._forget(expanded.sequences)

    def _admit(self, sequences: list[Sequence]) -> None:
        """Queue sequences on the decode thread; QueueFull counts those that other handlers wait for."""
        limit = self._settings.max_running_requests + self._settings.max_queued_requests
        if len(self._waiters) + len(sequences) > limit:
            raise QueueFull(f"{len(self._waiters)} sequences run or wait, {len(sequences)} more exceed the limit of {limit}; retry later")
        for sequence in sequences:
            self._waiters[sequence] = asyncio.Queue()
        self.decode_loop.call(lambda core: core.add(sequences))

    async def _final(self, sequence: Sequence) -> dict[str, Any]:
        return await self._waiters[sequence].get()

    def _forget(self, sequences: list[Sequence]) -> None:
        """Stop waiting; what has not finished (the client went away) is aborted."""
        unfinished = {sequence for sequence in sequences if sequence.finish_reason is None}
        for sequence in sequences:
            self._waiters.pop(sequence, None)
        if unfinished:
            self.decode_loop.call(lambda core: core.abort(unfinished.__contains__))

    async def _stream(self, request: web.Request, expanded: Expanded) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        async for chunk in self._chunks(expanded):
            await response.write(b"data: " + _encode(chunk) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _chunks(self, expanded: Expanded) -> AsyncIterator[dict[str, Any]]:
        """Cumulative answers as they come, in any order of the sequences; a batch's carry their `index`."""
        merged: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        index_of = {sequence.rid: index for index, sequence in enumerate(expanded.sequences)}
        for sequence in expanded.sequences:
            self._waiters[sequence] = merged
        num_open = len(expanded.sequences)
        while num_open:
            chunk = await merged.get()
            num_open -= chunk["meta_info"]["finish_reason"] is not None
            yield chunk if expanded.is_single else chunk | {"index": index_of[chunk["meta_info"]["id"]]}

    def _tell_from_thread(self, sequences: list[Sequence]) -> None:
        # A growing sequence goes on changing: its answer is made here, before the next step. A finished one is made
        # on the event loop, so that the decode thread does not pay for text.
        chunks = [(sequence, None if sequence.finish_reason else answer(sequence, self._codec)) for sequence in sequences]
        self._event_loop.call_soon_threadsafe(self._tell, chunks)

    def _tell(self, chunks: list[tuple[Sequence, dict[str, Any] | None]]) -> None:
        for sequence, chunk in chunks:
            waiter = self._waiters.get(sequence)
            if waiter is not None:
                waiter.put_nowait(chunk or answer(sequence, self._codec))

    def _fail_from_thread(self, error: BaseException) -> None:
        def fail() -> None:
            if not self.failure.done():
                self.failure.set_exception(error)

        self._event_loop.call_soon_threadsafe(fail)

    # -- control -------------------------------------------------------------------------------------------------

    async def _abort(self, rid: str | None) -> None:
        """Abort what starts with `rid`, or all; their answers go out with what they have."""

        def abort(core: EngineCore) -> None:
            self._tell_from_thread(core.abort(lambda sequence: rid is None or sequence.matches(rid)))

        await asyncio.wrap_future(self.decode_loop.call(abort))

    async def abort_request(self, request: web.Request) -> web.Response:
        """POST /abort_request; 200 also when nothing matches, as SGLang."""
        body = await _typed(request, Abort)
        if body.abort_all or body.rid:
            await self._abort(None if body.abort_all else body.rid)
        return web.Response()

    async def pause_generation(self, request: web.Request) -> web.Response:
        """POST /pause_generation: abort ends what runs, retract puts it back in the queue, in_place freezes it."""
        mode = (await _typed(request, Pause)).mode
        if mode not in ("abort", "retract", "in_place"):
            raise ValueError(f"pause mode {mode!r}; expected abort, retract or in_place")

        def pause(core: EngineCore) -> None:
            core.is_paused = True
            if mode == "abort":
                self._tell_from_thread(core.abort(lambda _: True))
            if mode == "retract":
                core.retract()

        await asyncio.wrap_future(self.decode_loop.call(pause))
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, request: web.Request) -> web.Response:
        """POST /continue_generation."""

        def resume(core: EngineCore) -> None:
            core.is_paused = False

        await asyncio.wrap_future(self.decode_loop.call(resume))
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    async def flush_cache(self, request: web.Request) -> web.Response:
        """/flush_cache: there is no prefix cache to flush, so only SGLang's refusal with requests in flight is kept."""
        if self._waiters:
            return web.Response(status=400, text=f"Cache not flushed: {len(self._waiters)} requests are in flight.\n")
        return web.Response(text="Cache flushed.\n")

    async def update_weights_from_disk(self, request: web.Request) -> web.Response:
        """POST /update_weights_from_disk: read and check all, then swap between two decode steps."""
        body = await _typed(request, UpdateWeights)
        async with self._update_lock:
            try:
                weights = await asyncio.to_thread(self._read_weights, Path(body.model_path))
            except WeightsError as error:
                return _json({"success": False, "message": error.text, "num_paused_requests": 0}, 400)
            if body.abort_all_requests:
                await self._abort(None)
            num_paused = await asyncio.wrap_future(self.decode_loop.call(lambda core: _swap(core, weights, body.weight_version)))
            self._model_path = Path(body.model_path)
        return _json({"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": num_paused})

    def _read_weights(self, path: Path) -> ModelWeights:
        served = self._core.model.weights
        return ModelWeights(path, self._core.model.config, served.embedding.dtype, old=served)

    async def update_weight_version(self, request: web.Request) -> web.Response:
        """POST /update_weight_version."""
        body = await _typed(request, UpdateVersion)
        if body.abort_all_requests:
            await self._abort(None)
        await asyncio.wrap_future(self.decode_loop.call(lambda core: core.rename_version(body.new_version)))
        message = f"Weight version updated to {body.new_version}"
        return _json({"success": True, "message": message, "new_version": body.new_version})

    async def weights_checker(self, request: web.Request) -> web.Response:
        """POST /weights_checker: the hash of every tensor as it is in memory now, by the name that it was loaded by."""
        body = await _typed(request, CheckWeights)
        if body.action != "checksum":
            return _json({"success": False, "message": f"action {body.action!r}; this engine knows checksum"}, 400)
        async with self._update_lock:
            weights, version = await asyncio.wrap_future(self.decode_loop.call(lambda core: (core.model.weights, core.version)))
            forms = await asyncio.to_thread(weights.served_forms)
        kept = {form.name: form for form in forms if not any(part in form.name for part in body.skip_tensor_list)}
        digest = version_digest(kept, {name: form.hash for name, form in kept.items()})
        rank = {"checksums": {name: form.hash for name, form in kept.items()}, "per_gpu_checksum": digest, "parallelism_info": _ALONE}
        answer = {"success": True, "message": "Success", "weight_version": version, "ranks": [rank], "per_engine_checksum": digest}
        return _json(answer)

    # -- state ---------------------------------------------------------------------------------------------------

    async def health(self, request: web.Request) -> web.Response:
        """GET /health and /health_generate: 200 when the decode thread takes a turn and is not paused."""

        def check(core: EngineCore) -> bool:
            return not core.is_paused

        try:
            is_healthy = await asyncio.wait_for(asyncio.wrap_future(self.decode_loop.call(check)), HEALTH_TIMEOUT_S)
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
        config = self._core.model.config
        return _json(
            {
                "model_path": str(self._model_path),
                "served_model_name": str(self._settings.model_path),
                "tokenizer_path": str(self._settings.model_path),
                "is_generation": True,
                "weight_version": self._core.version,
                "model_type": config.architecture.removesuffix("ForCausalLM").lower(),
                "architectures": [config.architecture],
                "vocab_size": config.vocab_size,
                "context_length": self._settings.context_length,
            }
        )

    async def server_info(self, request: web.Request) -> web.Response:
        """GET /server_info: the settings, and the load in `internal_states`."""
        settings = msgspec.structs.asdict(self._settings) | {"model_path": str(self._settings.model_path)}
        fixed = {"version": "slimebus-cpu", "tp_size": 1, "dp_size": 1, "device": "cpu", "vocab_size": self._core.model.config.vocab_size}
        load = self.decode_loop.load() | {"token_capacity": self._core.cache.budget_tokens, "time_s": time.time()}
        return _json(settings | fixed | {"weight_version": self._core.version, "internal_states": [load]})

    async def models(self, request: web.Request) -> web.Response:
        """GET /v1/models."""
        name = str(self._settings.model_path)
        model = {"id": name, "object": "model", "owned_by": "slimebus", "root": name, "max_model_len": self._settings.context_length}
        return _json({"object": "list", "data": [model]})


def _swap(core: EngineCore, weights: ModelWeights, version: str | None) -> int:
    core.swap_weights(weights, version)
    return len(core.scheduler.running) if core.is_paused else 0


async def _typed(request: web.Request, kind: type[Any]) -> Any:
    return msgspec.json.decode(await request.read() or b"{}", type=kind)


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=_encode(value), status=status, content_type="application/json")


@web.middleware
async def _errors_as_json(request: web.Request, handler: Any) -> web.StreamResponse:
    """SGLang's error shape, `{"error": {"message"}}`: 400 for what the request got wrong, 503 for a full queue."""
    try:
        response: web.StreamResponse = await handler(request)
    except (msgspec.DecodeError, ValueError) as error:
        return _json({"error": {"message": str(error)}}, 400)
    except QueueFull as error:
        return _json({"error": {"message": str(error)}}, 503)
    return response
