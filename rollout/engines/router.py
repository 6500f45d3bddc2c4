"""sglang-router in front of a pool: samples come through it, everything else goes to the engines themselves.

It passes on no pause, abort or weight update, takes one prompt a request, and asks any engine that it knows. So it gets to know an
engine once that serves, and again when it ceases to; its own health checks, which would take out an engine that is paused, are off.
"""

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollout.engines.engine import Engine, Requests
from rollout.engines.engine_state import EngineState
from rollout.engines.sglang.client import GENERATE_TIMEOUT_S, EngineClient
from rollout.engines.sglang.process import EngineProcess, option_list
from slimebus.bus.errors import SlimebusError, Unreachable
from slimebus.config.schema import RunConfig
from slimebus.process.launch import free_port

log = logging.getLogger("rollout")

START_TIMEOUT_S, POLL_S, STOP_S = 60.0, 0.1, 1.0
KEY_HEADER = "X-SMG-Routing-Key"
OURS = {"policy": "manual", "disable_health_check": True, "log_level": "warn"}
"""manual: requests with the same key go to the same engine."""


class RouterClient(EngineClient):
    """Samples through a router. engines: those behind it, which get the aborts."""

    def __init__(self, url: str, engines: Callable[[], Sequence[Engine]], **options: Any) -> None:
        super().__init__(url, **options)
        self._engines = engines

    async def _generate(self, body: dict[str, Any], rids: Sequence[str], session: str = "") -> list[Any]:
        prompts, sampling = body["input_ids"], body["sampling_params"]
        self._check(prompts, rids)
        samplings = [sampling] * len(prompts) if isinstance(sampling, dict) else sampling

        def call(prompt: list[int], one: dict[str, Any], rid: str) -> Coroutine[Any, Any, bytes]:
            single = {**body, "input_ids": prompt, "sampling_params": one, "return_logprob": True}
            return self._call("/generate", single, rids=rid, timeout_s=GENERATE_TIMEOUT_S, headers={KEY_HEADER: session or rid})

        replies = await asyncio.gather(*map(call, prompts, samplings, rids))
        return self._answers(b"[" + b",".join(replies) + b"]", len(prompts))

    async def abort(self, rid: str) -> None:
        await asyncio.gather(*(engine.client.abort(rid) for engine in self._engines()), return_exceptions=True)


class Router:
    """The router's process, kept running, and the engines that it knows. `target` stands for all of them in dispatch."""

    def __init__(
        self, config: RunConfig, log_file: Path, engines: Callable[[], list[Engine]], vocab_size: int | None, *,
        on_change: Callable[[], None],
    ) -> None:  # fmt: skip
        self.config, self.engines, port = config, engines, free_port()
        arguments = option_list({"host": "127.0.0.1", "port": port, "prometheus_port": free_port(), **OURS, **_plain(config.router)})
        command = [config.engine.engine_python or sys.executable, "-m", "sglang_router.launch_router", *arguments]
        self.process = EngineProcess(command, f"http://127.0.0.1:{port}", log_file)
        self.client, self.on_change = RouterClient(self.process.url, engines, vocab_size=vocab_size), on_change
        self.target = Requests(self.client, EngineState(self.process.url))
        self._known: dict[str, str] = {}
        self._following: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start it, wait until it is up, and keep it so. Raises Unreachable with the tail of its log."""
        await self._launch()
        self._following = asyncio.create_task(self._follow_engines())

    async def _launch(self) -> None:
        self._known = {}
        self.process.start()
        deadline = time.monotonic() + START_TIMEOUT_S
        while await self.client.status("/health", 2.0) != 200:
            if self.process.is_dead() or time.monotonic() > deadline:
                raise Unreachable(self.process.why(f"the router at {self.process.url} did not start"))
            await asyncio.sleep(POLL_S)
        log.info("started sglang-router at %s (log: %s)", self.process.url, self.process.log_path)

    async def _follow_engines(self) -> None:
        """Tell it of engines that begin or cease to serve; start it again when it ends."""
        while True:
            try:
                if self.process.is_dead():
                    self._move_state("replaced")
                    log.error("the router at %s ended; starting it again", self.process.url)
                    await self._launch()
                await self._update_workers()
            except SlimebusError as bad:
                log.warning("%s", bad.text)
            await asyncio.sleep(POLL_S)

    async def _update_workers(self) -> None:
        serving = {engine.url: engine for engine in self.engines() if engine.state.is_in_service}
        self.target.state.version = next((engine.state.version for engine in serving.values()), "")
        if serving.keys() == self._known.keys() and self.target.state.phase == "serving":
            return
        for url in self._known.keys() - serving.keys():
            await self._call_router(f"/workers/{self._known.pop(url)}", method="DELETE")
        for url in serving.keys() - self._known.keys():
            key = self._key_of(serving[url])
            self._known[url] = str((await self._call_router("/workers", {"url": url, **({"api_key": key} if key else {})}))["worker_id"])
        listed = {one["url"] for one in (await self._call_router("/workers"))["workers"]}
        self._move_state("replaced")
        if self._known.keys() <= listed and listed:
            self._move_state("ready with weights")

    def _move_state(self, cause: str) -> None:
        self.target.state.move(cause)
        self.on_change()

    def _key_of(self, engine: Engine) -> str:
        return self.config.engine.engine_api_key if engine.process is None else engine.process.api_key

    async def _call_router(self, path: str, body: dict[str, Any] | None = None, method: str = "") -> dict[str, Any]:
        return msgspec.json.decode(await self.client._call(path, body, method=method), type=dict[str, Any])

    async def let_go(self, engine: Engine) -> None:
        """It asks this engine, which is draining, no more, and what the engine had of it ends."""
        while engine.url in self._known:
            await asyncio.sleep(POLL_S)
        await asyncio.gather(*map(engine.client.abort, self.target.rids), return_exceptions=True)

    async def stop(self) -> None:
        """End it."""
        if self._following is not None:
            self._following.cancel()
        await self.client.close()
        await asyncio.to_thread(self.process.stop, STOP_S)


def _plain(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name.lstrip("-").replace("-", "_"): value for name, value in arguments.items()}
