"""One engine as the pool sees it: its state, the client that speaks to it, and the requests that it has."""

import asyncio
import contextlib
import errno
import logging
import socket
import sys
import time
from urllib.parse import urlsplit

from rollout.engines.backends import BACKENDS, EngineApi, Sampler
from rollout.engines.engine_state import EngineState
from rollout.engines.sglang.process import EngineProcess
from rollout.samples.response import Completion
from slimebus.bus.errors import SlimebusError, UsageError, WeightsError
from slimebus.bus.messages import NO_VERSION, EngineReport
from slimebus.config.engine_plan import EngineSpec
from slimebus.config.schema import EngineConfig
from slimebus.weights.host.shared_folder import SharedVersion

log = logging.getLogger("rollout")

CLAIM_WAIT_S, CLAIM_POLL_S = 15.0, 0.2
"""A worker that is just leaving, with what it is sampling, is waited for."""
ABORT_TIMEOUT_S = 5.0
ABORT_POLL_S = 0.05
RESUME_TIMEOUT_S = 1.0
OWN_RETRY_S, ATTACHED_RETRY_S = 3.0, 30.0
"""How long a lost connection is retried: our own engine on this host that does not answer has ended."""
ATTACHED = EngineSpec()


class Requests:
    """Those at one engine, or at the router in front of several. running: how many, or on their way, as dispatch counts them.

    ended_at: when the last one ended, or the first one began, by the loop's clock.
    """

    def __init__(self, client: Sampler, state: EngineState) -> None:
        self.client, self.state, self.running, self.ended_at = client, state, 0, 0.0
        self._calls: set[asyncio.Task[list[Completion]]] = set()
        self._groups: dict[str, str] = {}

    @property
    def rids(self) -> list[str]:
        """Of the requests that are there."""
        return list(self._groups)

    async def generate(
        self, prompts: list[list[int]], samplings: list[dict[str, object]], rids: list[str], *, group: str = "", session: str = ""
    ) -> list[Completion]:
        """One completion a prompt. Raises WeightsError when the engine is out of service, or gets so meanwhile."""
        lost = WeightsError(f"the engine at {self.state.url} is out of service until its weights are whole again; the group is given back")
        if self.state.phase != "serving":
            raise lost
        version = self.state.version
        call = asyncio.ensure_future(self.client.generate(prompts, samplings, rids, cache_key=version, session=session))
        self._calls.add(call)
        self.ended_at = self.ended_at if self._groups else asyncio.get_running_loop().time()
        self._groups |= dict.fromkeys(rids, group)
        try:
            return await call
        except asyncio.CancelledError:
            call.cancel()
            aborts = asyncio.gather(*(self.client.abort(rid) for rid in rids), return_exceptions=True)
            await asyncio.shield(asyncio.wait({aborts}, timeout=ABORT_TIMEOUT_S))
            aborts.cancel()
            task = asyncio.current_task()
            if task is None or not task.cancelling():  # `end` cancelled the call, and not its caller
                raise lost from None
            raise
        finally:
            self._calls.discard(call)
            self.ended_at = asyncio.get_running_loop().time()
            for rid in rids:
                del self._groups[rid]

    async def abort(self, group: str | None = None) -> None:
        """End those of this group, or all: their callers get what there is. Returns once none is left."""
        # A request that arrives at the engine while this goes out is ended by another round.
        while rids := [rid for rid, of in self._groups.items() if group in (None, of)]:
            await asyncio.gather(*map(self.client.abort, rids), return_exceptions=True)
            await asyncio.sleep(ABORT_POLL_S)

    def end(self) -> None:
        """All end with WeightsError."""
        for call in self._calls:
            call.cancel()


class Engine(Requests):
    """One engine: its client, the process if it was started here, and its requests. spec: what it was started as."""

    client: EngineApi

    def __init__(
        self, url: str, process: EngineProcess | None, vocab_size: int | None, config: EngineConfig, *, spec: EngineSpec = ATTACHED
    ) -> None:
        self.vocab_size, self.config, self.spec = vocab_size, config, spec
        state = EngineState(url, model=spec.model, is_owned=process is not None, is_frozen=spec.is_frozen)
        super().__init__(self.connect(url, process, state), state)

    def connect(self, url: str, process: EngineProcess | None, state: EngineState) -> EngineApi:
        """It is there from now on."""
        self.process, state.url = process, url
        retry_s, key = (ATTACHED_RETRY_S, self.config.engine_api_key) if process is None else (OWN_RETRY_S, process.api_key)
        self.client = BACKENDS[self.config.engine].connect(url, self.vocab_size, retry_s, key, self.config)
        return self.client

    @property
    def url(self) -> str:
        """Where it is."""
        return self.state.url

    @property
    def is_dead(self) -> bool:
        """True once the process that was started here has ended."""
        return self.process is not None and self.process.is_dead()

    def report(self) -> EngineReport:
        """What the broker hears of it."""
        state = self.state
        number = state.version.rpartition(":")[2] if state.phase in ("serving", "draining") else ""
        version, phase = int(number) if number.isdigit() else NO_VERSION, "syncing" if state.phase == "updating" else state.phase
        return EngineReport(url=self.url, model=state.model, state=phase, version=version, running=self.running, is_owned=state.is_owned)

    async def wait_ready(self, timeout_s: float) -> None:
        """Return once it is up. Raises SlimebusError."""
        await (self.process or self.client).wait_ready(timeout_s)

    async def load(self, version: SharedVersion) -> None:
        """It serves exactly this version on return; by deltas where it verifiably has another one. Raises SlimebusError."""
        await self.client.load(version, self.state.version)

    async def resume(self) -> None:
        """An attached engine goes on for others after a load that was cut off; its weights may be those of two versions."""
        try:
            async with asyncio.timeout(RESUME_TIMEOUT_S):
                await self.client.resume()
        except (SlimebusError, TimeoutError) as bad:
            log.warning("engine at %s may be left paused: %s", self.url, str(bad) or "no answer")

    async def close(self) -> None:
        """Close the connections."""
        await self.client.close()


async def claim(url: str) -> socket.socket:
    """Keep an attached engine from other workers of this host: two would move it from version to version at once.

    The claim is a name among this host's abstract sockets, which ends when it is closed or its process ends. Raises UsageError for no
    URL, and when another worker still has the engine after CLAIM_WAIT_S.
    """
    name = f"\0slimebus-engine-{await _address_of(url)}"
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    if sys.platform != "linux":  # others have no abstract sockets, and nothing that ends as surely with its process
        return lock
    deadline = time.monotonic() + CLAIM_WAIT_S
    while True:
        try:
            lock.bind(name)
            return lock
        except OSError as bad:
            if bad.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                lock.close()
                raise UsageError(f"the engine at {url} is another worker's of this host; give each worker engines of its own") from None
        await asyncio.sleep(CLAIM_POLL_S)


async def _address_of(url: str) -> str:
    """The same for each way to write the address. Raises UsageError when it is none."""
    host, port = host_and_port(url)
    with contextlib.suppress(OSError):
        host = str((await asyncio.get_running_loop().getaddrinfo(host, port, family=socket.AF_INET))[0][4][0])
    return f"{host}:{port}"


def host_and_port(url: str) -> tuple[str, int | None]:
    """Of an engine's address, the host in lower case and without brackets. Raises UsageError when it is none."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        host.encode("idna")  # as it is asked for
    except ValueError as bad:  # of a port, a bracket, or a part of a name that is too long
        raise UsageError(f"{url!r} is no engine's address ({bad}); expected http://HOST:PORT") from None
    return host, port
