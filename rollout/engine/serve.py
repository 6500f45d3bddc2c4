"""Builds an engine from its settings and serves it until it is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys

import msgspec
from aiohttp import web

from rollout.engine.core import EngineCore
from rollout.engine.kv_cache import KVCache
from rollout.engine.model import Model
from rollout.engine.model_config import ModelConfig
from rollout.engine.model_weights import ModelWeights
from rollout.engine.parent import watch_parent
from rollout.engine.request import RequestExpander
from rollout.engine.scheduler import Scheduler
from rollout.engine.server import EngineServer
from rollout.engine.settings import Settings
from rollout.engine.text import TextCodec
from slimebus.errors import ConfigError

SHUTDOWN_S = 1.0
"""For each of two: the HTTP server, which gives answers under way a quarter of it, and again when they are cancelled; the decode thread."""
# Torch releases the GIL in every operation; without this the decode thread waits up to 5 ms to get it back.
SWITCH_INTERVAL_S = 0.0005


def load_engine(settings: Settings) -> tuple[Settings, EngineCore, RequestExpander, TextCodec | None]:
    """Read the model and build everything that needs no socket; the settings come back with the context length filled in."""
    import torch

    torch.set_num_threads(settings.threads)
    config = ModelConfig.read(settings.model_path)
    dtype = getattr(torch, settings.served_dtype)
    cache = KVCache(config, int(settings.kv_cache_gb * 2**30), dtype)
    longest = settings.context_length or config.context_length
    settings = msgspec.structs.replace(settings, context_length=min(longest, cache.budget_tokens))
    if settings.context_length < 2:
        raise ConfigError(f"--kv-cache-gb {settings.kv_cache_gb} holds {cache.budget_tokens} tokens of this model; give more")
    weights = ModelWeights(settings.model_path, config, dtype)
    codec = TextCodec.find(settings.model_path)
    scheduler = Scheduler(
        max_running=settings.max_running_requests,
        max_prefill_tokens=settings.max_prefill_tokens,
        fits=cache.fits,
    )
    model = Model(config, weights, settings.context_length)
    core = EngineCore(
        model, cache, scheduler, version=settings.weight_version, seed=settings.seed, decode_text=codec.decode if codec else None
    )
    return settings, core, RequestExpander(config, settings.context_length, codec), codec


async def serve(settings: Settings, sock: socket.socket, parent_pid: int | None) -> None:
    """Serve on `sock` until SIGTERM, SIGINT or the parent's end; raises what ended the decode thread, if that did."""
    ended = asyncio.Event()
    event_loop = asyncio.get_running_loop()
    # Loading blocks the event loop, and until it is done a signal simply ends the process: nothing is being served yet.
    settings, core, expander, codec = load_engine(settings)
    for number in (signal.SIGTERM, signal.SIGINT):
        event_loop.add_signal_handler(number, ended.set)
    if parent_pid is not None:
        watch_parent(event_loop, parent_pid, ended.set)
    server = EngineServer(settings, core, expander, codec)
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


def run(settings: Settings, sock: socket.socket, parent_pid: int | None) -> None:
    """Load the model and serve it on the bound `sock`; returns when told to end."""
    import uvloop

    sys.setswitchinterval(SWITCH_INTERVAL_S)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with contextlib.closing(sock):
        uvloop.run(serve(settings, sock, parent_pid))
