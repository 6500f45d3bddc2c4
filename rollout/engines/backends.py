"""The kinds of engines (engine.engine). Another one is a folder beside sglang/ that keeps to EngineApi, and a row in BACKENDS."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from rollout.embedded.settings import API_KEY_VARIABLE
from rollout.engines.sglang.process import EngineProcess, option_list, sglang_process
from rollout.engines.sglang.weights import SGLangEngine
from rollout.samples.response import Completion
from slimebus.config.engine_plan import EngineSpec
from slimebus.config.schema import EngineConfig, RunConfig
from slimebus.process.launch import free_port
from slimebus.weights.host.shared_folder import SharedVersion


class Sampler(Protocol):
    """What is asked for samples. Calls raise Unreachable when it does not answer, UsageError for what it refuses."""

    async def generate(
        self, prompts: Sequence[list[int]], sampling: Sequence[dict[str, Any]], rids: Sequence[str], *, cache_key: str = "",
        session: str = "",
    ) -> list[Completion]:  # fmt: skip
        """One completion for each prompt, in order, with the version that made each token.

        cache_key: only requests with the same one share what was computed for a common prefix. session: its requests go on from each other.
        """

    async def abort(self, rid: str) -> None:
        """End a request; its generate call returns what it has. No error when there is none."""

    async def close(self) -> None:
        """Close the connections, for good."""


class EngineApi(Sampler, Protocol):
    """A client of one engine that runs."""

    async def wait_ready(self, timeout_s: float) -> None:
        """Return once it is up, also when it is paused."""

    async def answers(self, timeout_s: float) -> bool:
        """Whether anything answers within `timeout_s`. Never raises."""

    async def score(self, tokens: list[int], rid: str) -> np.ndarray:
        """log p(tokens[t] | tokens[:t]), float32 [T]; 0 for the first."""

    async def load(self, version: SharedVersion, base: str) -> None:
        """Pause or swap, load, verify, go on: it serves exactly this version, by the name `version.tag`, on return.

        base: the version that it verifiably has; empty where that is unknown, and then it is given everything. Raises WeightsError or
        Unreachable; after that, or when it is cancelled, it may be paused and have the weights of two versions.
        """

    async def resume(self) -> None:
        """Go on after a load that was cut off."""

    async def weight_version(self, *, retry_s: float | None = None) -> str:
        """The name of the version that it serves; retry_s: for how long a lost connection is tried again, if not as usual."""

    async def server_info(self, *, retry_s: float | None = None) -> dict[str, Any]:
        """What it says of itself: version, model_path, dtype, tp_size."""


class Backend(NamedTuple):
    """process_for: an engine's process, not started yet; its last argument is the key that clients must send.

    connect: a client of URL, vocabulary, seconds that a lost connection is tried again, key and config.
    """

    process_for: Callable[[RunConfig, EngineSpec, Path, str], EngineProcess]
    connect: Callable[[str, int | None, float, str, EngineConfig], EngineApi]


MAX_RUNNING_REQUESTS = 256
"""Sequences that it decodes at once."""


def embedded_engine(model_path: Path, log_path: Path, *, arguments: tuple[str, ...] = (), api_key: str = "") -> EngineProcess:
    """The embedded CPU engine on `model_path`, on a free port."""
    port = free_port()
    command = [sys.executable, "-m", "rollout.embedded", "--model-path", str(model_path), "--port", str(port), *arguments]
    return EngineProcess(command, f"http://127.0.0.1:{port}", log_path, env={API_KEY_VARIABLE: api_key}, api_key=api_key)


def _embedded_process(config: RunConfig, spec: EngineSpec, log_file: Path, api_key: str) -> EngineProcess:
    """As `Backend.process_for` says."""
    options = {"max_running_requests": MAX_RUNNING_REQUESTS, "threads": config.engine.engine_threads, "seed": config.seed}
    return embedded_engine(spec.directory, log_file, arguments=option_list(options), api_key=api_key)


def _connect_sglang(url: str, vocab_size: int | None, retry_s: float, api_key: str, config: EngineConfig) -> SGLangEngine:
    how: dict[str, Any] = {"pause_mode": config.pause_mode, "route": config.weight_route}
    return SGLangEngine(url, vocab_size=vocab_size, retry_s=retry_s, api_key=api_key, **how)


EMBEDDED = Backend(_embedded_process, _connect_sglang)  # it honours SGLang's API
BACKENDS = {"sglang": Backend(sglang_process, _connect_sglang), "cpu": EMBEDDED, "none": EMBEDDED}
"""By engine.engine. "none" is of workers: a teacher of such a run has an embedded engine."""
