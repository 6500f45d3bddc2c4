"""How an engine process was started."""

from pathlib import Path

import msgspec

API_KEY_VARIABLE = "SLIMEBUS_EMBEDDED_API_KEY"
"""Environment variable with the key that clients must send: `ps` shows arguments to every user of the host, and no environment."""


class Settings(msgspec.Struct, kw_only=True, frozen=True):
    """Options of the engine, as its command line documents them."""

    model_path: Path
    host: str
    port: int
    max_running_requests: int
    max_queued_requests: int
    max_prefill_tokens: int
    kv_cache_gb: float
    threads: int
    served_dtype: str
    seed: int | None
