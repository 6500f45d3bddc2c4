"""An engine as a child process: start it, wait until it is ready, end it and everything it started; SGLang's, with CUDA or without.

worker --> process_guard.py --> engine --> what it starts         when one ends, those on its right end too
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout.engines.sglang.client import EngineClient
from slimebus.atomic_file import make_private
from slimebus.bus.errors import SlimebusError, Unreachable
from slimebus.config.engine_plan import EngineSpec, visible
from slimebus.config.schema import RunConfig
from slimebus.process.launch import ChildProcess, free_port
from slimebus.process.process_guard import describe_exit_status

LOG_TAIL_LINES = 30
STOP_S = 10.0


class EngineStartError(SlimebusError):
    """An engine process ended, or was not ready in time; the text ends with the tail of its log."""

    code = "engine-start"


class EngineProcess:
    """A command that serves the engine contract on `url`, in a process group of its own; its output goes to `log_path`.

    It ends when this process does, killed or not.
    """

    def __init__(self, command: list[str], url: str, log_path: Path, *, env: dict[str, str] | None = None, api_key: str = "") -> None:
        """api_key: the key that clients of the command must send."""
        self.command, self.url, self.log_path, self.api_key = command, url.rstrip("/"), log_path, api_key
        self.environment = {"PYTHONSAFEPATH": "1", **(env or {})}
        self._child: ChildProcess | None = None

    @property
    def pid(self) -> int | None:
        """Process id of its guard, once started."""
        return None if self._child is None else self._child.process.pid

    def start(self) -> subprocess.Popen[bytes]:
        """Start the command and return its process; what it writes is appended to the log."""
        make_private(self.log_path.parent)
        self._child = ChildProcess(self.command, log=self.log_path, environment=self.environment)
        return self._child.process

    def is_dead(self) -> bool:
        """Whether the process was not started or has ended."""
        return self._child is None or self._child.process.poll() is not None

    async def wait_ready(self, timeout_s: float) -> None:
        """Return once the engine is ready; EngineStartError with its log's tail when it ended or took too long."""
        async with EngineClient(self.url, api_key=self.api_key) as client:
            try:
                await client.wait_ready(timeout_s, is_dead=self.is_dead)
            except Unreachable as error:
                raise EngineStartError(self.why(error.text)) from None

    def why(self, text: str) -> str:
        """This text, how the process ended, and the tail of its log."""
        status = None if self._child is None else self._child.process.poll()
        ended = "" if status is None else f" ({describe_exit_status(status)})"
        tail = self.log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join([f"{text}{ended}; command: {' '.join(self.command)}; the end of {self.log_path}:", *tail])

    def stop(self, timeout_s: float = STOP_S) -> None:
        """End it and all that it started: SIGTERM, then SIGKILL after `timeout_s`. Idempotent."""
        if self._child is not None:
            self._child.stop(timeout_s)
        self._child = None


SHIM_PATH = Path(__file__).parent / "cpu_shim"

# Measured on a 2-core machine: ready in 24 s idle, 85 s under load.
READY_TIMEOUT_S = 600.0

# What the trainer publishes. SGLang's own choice, for a config that says float32, is float16, with a smaller range.
DTYPE_ARGUMENTS = ("--dtype", "bfloat16")

CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
# Without --sleep-on-idle an idle server spins on one core.
CPU_ARGUMENTS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--disable-overlap-schedule", "--sleep-on-idle"),
    *("--max-total-tokens", "16384", "--mem-fraction-static", "0.2", "--max-running-requests", "16"),
)


def has_cuda() -> bool:
    """Whether an NVIDIA driver is loaded on this machine; imports nothing."""
    return Path("/proc/driver/nvidia/version").exists()


def sglang_server(
    model_path: str | Path, log_path: Path, *, port: int = 0, arguments: tuple[str, ...] = (), python: str = "",
    on_cpu: bool | None = None, api_key: str = "", gpus: Sequence[int] = (),
) -> EngineProcess:  # fmt: skip
    """A server of `model_path` started by `python` (default: this interpreter); port 0 takes a free one.

    `arguments` go to `sglang.launch_server` as they are and win over ours.
    `gpus`: those that it sees; none: as this process does.
    `on_cpu`: apply the CPU flags and the shim (default: where there is no CUDA driver). Wait for it with
    `wait_ready(READY_TIMEOUT_S)`.
    """
    port = port or free_port()
    is_cpu = not has_cuda() if on_cpu is None else on_cpu
    key, key_arguments = _key_arguments(api_key, log_path, arguments)
    # argparse takes the last of a repeated option, so the caller's come last.
    command = [
        *(python or sys.executable, "-m", "sglang.launch_server", "--model-path", str(model_path)),
        *("--host", "127.0.0.1", "--port", str(port), *DTYPE_ARGUMENTS, *key_arguments),
        *(CPU_ARGUMENTS if is_cpu else ()),
        *arguments,
    ]
    environment = _cpu_environment() if is_cpu else visible(gpus)
    return EngineProcess(command, f"http://127.0.0.1:{port}", log_path, env=environment, api_key=key)


def sglang_process(config: RunConfig, spec: EngineSpec, log_file: Path, api_key: str) -> EngineProcess:
    """As `backends.Backend.process_for` says."""
    python, arguments = config.engine.engine_python, option_list(spec.arguments)
    return sglang_server(spec.directory, log_file, python=python, arguments=arguments, api_key=api_key, gpus=spec.gpus)


def _key_arguments(api_key: str, log_path: Path, arguments: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """The key that clients must send, and the arguments that tell SGLang: the caller's --api-key, else ours.

    As an argument `ps` shows it to everybody, so ours goes into a YAML file for --config that only we may read. There is none with a
    --config of the caller's, for SGLang reads one file.
    """
    if "--api-key" in arguments:
        return arguments[arguments.index("--api-key") + 1], ()
    if not api_key or "--config" in arguments:
        return "", ()
    file = log_path.with_suffix(".config.yaml")
    make_private(file.parent)
    file.unlink(missing_ok=True)
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(f"api-key: {api_key}\n")
    return api_key, ("--config", str(file))


def option_list(args: dict[str, Any]) -> tuple[str, ...]:
    """`{"tp_size": 2, "enable-metrics": True}` as `("--tp-size", "2", "--enable-metrics")`; a list repeats its values after the name."""
    options: list[str] = []
    for name, value in args.items():
        if value is None or value is False:
            continue
        options.append("--" + name.lstrip("-").replace("_", "-"))
        options += [] if value is True else [str(item) for item in value] if isinstance(value, list) else [str(value)]
    return tuple(options)


def _cpu_environment() -> dict[str, str]:
    inherited = os.environ.get("PYTHONPATH")
    return {**CPU_ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(SHIM_PATH), *([inherited] if inherited else [])])}
