"""A real SGLang server as a child process, with CUDA or without."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from rollout.engine_process import EngineProcess
from slimebus.launch import free_port

GUARD_PATH = Path(__file__).parent / "process_guard.py"
SHIM_PATH = Path(__file__).parent / "sglang_cpu"

# Measured on a 2-core machine: ready in 24 s idle, 85 s under load.
READY_TIMEOUT_S = 600.0

# What the trainer publishes. SGLang's own choice, for a config that says float32, is float16, whose range is smaller.
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
    model_path: str | Path, log_path: Path, *, host: str = "127.0.0.1", port: int = 0, arguments: tuple[str, ...] = (),
    python: str = "", on_cpu: bool | None = None,
) -> EngineProcess:  # fmt: skip
    """A server of `model_path` started by `python` (default: this interpreter); port 0 takes a free one.

    It ends when this process ends, killed or not. `arguments` go to `sglang.launch_server` as they are and win over ours.
    `on_cpu`: apply the CPU flags and the shim (default: where there is no CUDA driver). Wait for it with
    `wait_ready(READY_TIMEOUT_S)`.
    """
    port = port or free_port()
    is_cpu = not has_cuda() if on_cpu is None else on_cpu
    # argparse takes the last of a repeated option, so the caller's come last.
    command = [
        *(sys.executable, str(GUARD_PATH), str(os.getpid())),
        *(python or sys.executable, "-m", "sglang.launch_server", "--model-path", str(model_path)),
        *("--host", host, "--port", str(port), *DTYPE_ARGUMENTS),
        *(CPU_ARGUMENTS if is_cpu else ()),
        *arguments,
    ]
    return EngineProcess(command, f"http://{host}:{port}", log_path, env=_cpu_environment() if is_cpu else None)


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
