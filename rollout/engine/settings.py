"""How an engine process was started."""

from __future__ import annotations

from pathlib import Path

import msgspec


class Settings(msgspec.Struct, kw_only=True, frozen=True):
    """Options of the engine; `context_length` is 0 for the model's own.

    max_running_requests   rows of the decode batch
    max_queued_requests    sequences that may wait beyond those; more are refused with 503
    max_prefill_tokens     padded prompt tokens computed in one step
    kv_cache_gb            most memory for keys and values, GiB
    threads                torch threads
    """

    model_path: Path
    host: str = "127.0.0.1"
    port: int = 30000
    max_running_requests: int = 256
    max_queued_requests: int = 4096
    max_prefill_tokens: int = 8192
    kv_cache_gb: float = 2.0
    context_length: int = 0
    threads: int = 1
    served_dtype: str = "float32"
    weight_version: str = "default"
    seed: int | None = None
