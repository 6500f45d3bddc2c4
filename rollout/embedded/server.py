"""HTTP in front of the decode loop: SGLang's native endpoints; from an engine's settings to its end."""

import asyncio
import contextlib
import hmac
import os
import signal
import socket
import sys
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import torch
import uvloop
from aiohttp import web
from tokenizers import Tokenizer

from rollout.embedded.core import DecodeLoop, EngineCore
from rollout.embedded.kv_cache import KVCache
from rollout.embedded.model import EmbeddedModel
from rollout.embedded.model_config import EmbeddedModelConfig
from rollout.embedded.model_weights import ModelWeights
from rollout.embedded.request import GenerateBody, RequestExpander
from rollout.embedded.scheduler import Scheduler
from rollout.embedded.sequence import Sequence
from rollout.embedded.settings import API_KEY_VARIABLE, Settings
from slimebus.bus.errors import ConfigError, WeightsError

HEALTH_TIMEOUT_S = 20.0  # SGLang's: a health check that generates nothing for so long is a 503

T = TypeVar("T")
Body = TypeVar("Body", bound=msgspec.Struct)

_encode = msgspec.json.Encoder().encode


class UpdateWeights(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of /update_weights_from_disk; known prefixes are forgotten for any `flush_cache`."""

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
        self._expander = RequestExpander(core.model, has_tokenizer=core.tokenizer is not None)
        self._model_path = settings.model_path
        self._waiters: dict[Sequence, asyncio.Future[None]] = {}
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
        sequences, is_single = self._expander.expand(await _typed(request, GenerateBody))
        try:
            await asyncio.wait(self._admit(sequences))
        finally:
            self._forget(sequences)
        answers = [generate_reply(sequence) for sequence in sequences]
        return _json(answers[0] if is_single else answers)

    def _admit(self, sequences: list[Sequence]) -> list[asyncio.Future[None]]:
        """Queue sequences on the decode thread; a future of each one's end. QueueFull counts those that other handlers wait for."""
        limit = self._settings.max_running_requests + self._settings.max_queued_requests
        if len(self._waiters) + len(sequences) > limit:
            raise QueueFull(f"{len(self._waiters)} sequences run or wait, {len(sequences)} more exceed the limit of {limit}; retry later")
        ends: list[asyncio.Future[None]] = [self._event_loop.create_future() for _ in sequences]
        self._waiters |= zip(sequences, ends, strict=True)
        self.decode_loop.call(lambda core: core.add(sequences))
        return ends

    def _forget(self, sequences: list[Sequence]) -> None:
        """Stop waiting; what has not finished (the client went away) is aborted."""
        unfinished = {sequence for sequence in sequences if sequence.finish_reason is None}
        for sequence in sequences:
            self._waiters.pop(sequence, None)
        if unfinished:
            self.decode_loop.call(lambda core: core.abort(unfinished.__contains__))

    def _report_from_thread(self, sequences: list[Sequence]) -> None:
        self._event_loop.call_soon_threadsafe(self._report, sequences)

    def _report(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if (waiter := self._waiters.get(sequence)) is not None:
                waiter.set_result(None)

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


def generate_reply(sequence: Sequence) -> dict[str, Any]:
    """`{output_ids, meta_info}` of a finished sequence as SGLang says them. Logprobs are [logprob, token id, null]."""
    spans = [{"version": version, "start": start, "end": end} for version, start, end in sequence.version_spans]
    info: dict[str, Any] = {
        "id": sequence.rid,
        "finish_reason": sequence.finish_reason,
        "prompt_tokens": len(sequence.prompt),
        "weight_version": spans[-1]["version"] if spans else "default",
        "weight_versions": spans,
        "num_retractions": sequence.num_retractions,
        "completion_tokens": len(sequence.output_ids),
        "cached_tokens": sequence.num_cached_tokens,
        "e2e_latency": sequence.finished_s - sequence.created_s,
    }
    if sequence.return_logprob:
        scored = [] if sequence.logprob_start is None else sequence.prompt[sequence.logprob_start :]
        info["input_token_logprobs"] = list(zip([None, *sequence.input_logprobs], scored, repeat(None))) if scored else []
        info["output_token_logprobs"] = list(zip(sequence.output_logprobs, sequence.output_ids, repeat(None)))
    return {"output_ids": sequence.output_ids, "meta_info": info}


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


SHUTDOWN_S = 1.0
"""For each of two: the HTTP server, which gives answers under way a quarter of it, and again when they are cancelled; the decode thread."""
# Torch releases the GIL in every operation; without this the decode thread waits up to 5 ms to get it back.
SWITCH_INTERVAL_S = 0.0005


def load_engine(settings: Settings) -> EngineCore:
    """Read the model and build everything that needs no socket."""
    torch.set_num_threads(settings.threads)
    config = EmbeddedModelConfig.read(settings.model_path)
    dtype = getattr(torch, settings.served_dtype)
    cache = KVCache(config, int(settings.kv_cache_gb * 2**30), dtype)
    max_tokens = min(config.max_position_embeddings, cache.budget_tokens)
    if max_tokens < 2:
        raise ConfigError(f"--kv-cache-gb {settings.kv_cache_gb} holds {cache.budget_tokens} tokens of this model; give more")
    scheduler = Scheduler(max_running=settings.max_running_requests, max_prefill_tokens=settings.max_prefill_tokens, cache=cache)
    model = EmbeddedModel(config, ModelWeights(settings.model_path, config, dtype), max_tokens)
    return EngineCore(model, cache, scheduler, seed=settings.seed, tokenizer=_read_tokenizer(settings.model_path / "tokenizer.json"))


def _read_tokenizer(path: Path) -> Tokenizer | None:
    """None where there is none: such an engine serves ids only."""
    try:
        return Tokenizer.from_file(str(path)) if path.exists() else None
    except Exception as error:  # noqa: BLE001 (the tokenizers library raises bare Exception)
        raise ConfigError(f"{path} could not be read as a tokenizer: {error}") from None


async def serve(settings: Settings, sock: socket.socket) -> None:
    """Serve on `sock` until SIGTERM or SIGINT; raises what ended the decode thread, if that did."""
    ended = asyncio.Event()
    event_loop = asyncio.get_running_loop()
    # Loading blocks the event loop, and until it is done a signal simply ends the process: nothing is being served yet.
    core = load_engine(settings)
    for number in (signal.SIGTERM, signal.SIGINT):
        event_loop.add_signal_handler(number, ended.set)
    server = EngineServer(settings, core, os.environ.get(API_KEY_VARIABLE, ""))
    runner = web.AppRunner(server.application(), access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S / 4)
    await runner.setup()
    await web.SockSite(runner, sock, backlog=1024).start()
    server.decode_loop.start()
    print(f"engine: serving {settings.model_path} on http://{settings.host}:{sock.getsockname()[1]}", file=sys.stderr, flush=True)  # noqa: T201
    server.failure.add_done_callback(lambda _: ended.set())
    await ended.wait()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(runner.cleanup(), SHUTDOWN_S)
    server.decode_loop.stop(SHUTDOWN_S)
    if server.failure.done():
        server.failure.result()


def run_server(settings: Settings, sock: socket.socket) -> None:
    """Load the model and serve it on the bound `sock`; returns when told to end."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with contextlib.closing(sock):
        uvloop.run(serve(settings, sock))
