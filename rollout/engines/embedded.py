"""The embedded CPU engine (rollout/embedded) as a child process."""

import sys
from pathlib import Path

from rollout.embedded.settings import API_KEY_VARIABLE
from rollout.engines.sglang.process import EngineProcess
from rollout.engines.sglang.server import option_list
from slimebus.config.engine_plan import EngineSpec
from slimebus.config.schema import RunConfig
from slimebus.process.launch import free_port

MAX_RUNNING_REQUESTS = 256
"""Sequences that it decodes at once."""


def embedded_engine(model_path: Path, log_path: Path, *, arguments: tuple[str, ...] = (), api_key: str = "") -> EngineProcess:
    """The embedded CPU engine on `model_path`, on a free port."""
    port = free_port()
    command = [sys.executable, "-m", "rollout.embedded", "--model-path", str(model_path), "--port", str(port), *arguments]
    return EngineProcess(command, f"http://127.0.0.1:{port}", log_path, env={API_KEY_VARIABLE: api_key}, api_key=api_key)


def process_for(config: RunConfig, spec: EngineSpec, log_file: Path, api_key: str) -> EngineProcess:
    """As `backends.Backend.process_for` says."""
    options = {"max_running_requests": MAX_RUNNING_REQUESTS, "threads": config.engine.engine_threads, "seed": config.seed}
    return embedded_engine(spec.directory, log_file, arguments=option_list(options), api_key=api_key)
