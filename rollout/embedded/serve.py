"""Builds an engine from its settings and serves it until it is told to end."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from pathlib import Path

import torch
import uvloop
from aiohttp import web
from tokenizers import Tokenizer

from rollout.embedded.core import EngineCore
from rollout.embedded.kv_cache import KVCache
from rollout.embedded.model import Model
from rollout.embedded.model_config import ModelConfig
from rollout.embedded.model_weights import ModelWeights
from rollout.embedded.scheduler import Scheduler
from rollout.embedded.server import EngineServer
from rollout.embedded.settings import API_KEY_VARIABLE, Settings
from slimebus.bus.errors import ConfigError

SHUTDOWN_S = 1.0
"""For each of two: the HTTP server, which gives answers under way a quarter of it, and again when they are cancelled; the decode thread."""
# Torch releases the GIL in every operation; without this the decode thread waits up to 5 ms to get it back.
SWITCH_INTERVAL_S = 0.0005


def load_engine(settings: Settings) -> EngineCore:
    """Read the model and build everything that needs no socket."""
    torch.set_num_threads(settings.threads)
    config = ModelConfig.read(settings.model_path)
    dtype = getattr(torch, settings.served_dtype)
    cache = KVCache(config, int(settings.kv_cache_gb * 2**30), dtype)
    max_tokens = min(config.max_position_embeddings, cache.budget_tokens)
    if max_tokens < 2:
        raise ConfigError(f"--kv-cache-gb {settings.kv_cache_gb} holds {cache.budget_tokens} tokens of this model; give more")
    scheduler = Scheduler(max_running=settings.max_running_requests, max_prefill_tokens=settings.max_prefill_tokens, place=cache.place)
    model = Model(config, ModelWeights(settings.model_path, config, dtype), max_tokens)
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


def run(settings: Settings, sock: socket.socket) -> None:
    """Load the model and serve it on the bound `sock`; returns when told to end."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with contextlib.closing(sock):
        uvloop.run(serve(settings, sock))
