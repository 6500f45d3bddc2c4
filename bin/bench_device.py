"""The codec on tensors in a GPU's memory, against a copy within that memory: rows of `bin/bench weights`, none where there is no GPU."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from bench_row import Row, row

from slimebus.weights import codec, device_codec

REPEATS = 5


def rows(make_versions: Callable[[], list[np.ndarray]], device: str = "cuda") -> list[Row]:
    """Encode and apply, and what a step waits for: a scan on the device beside a copy of everything to pinned host memory."""
    try:
        import torch
    except ImportError:  # a broker's installation has none
        return []
    if device == "cuda" and not torch.cuda.is_available():
        return []
    base, target = make_versions()
    old, new, work = (torch.from_numpy(bits.view(np.int16)).to(device).view(torch.bfloat16) for bits in (base, target, base.copy()))
    host = torch.empty(work.shape, dtype=work.dtype, pin_memory=work.is_cuda)
    payload = codec.encode(base, target).payload
    works: dict[str, Callable[[], Any]] = {
        "memcpy": lambda: work.copy_(new),
        "encode": lambda: device_codec.encode(work, new, update=True, zstd=False),
        "apply": lambda: device_codec.apply(payload, work),
        "scan": lambda: device_codec.scan(work, new, update=True),
        "to_host": lambda: host.copy_(new, non_blocking=True),
    }
    seconds = _fastest(works, lambda: work.copy_(old), torch.cuda.synchronize if work.is_cuda else lambda: None)
    gbps = {name: base.nbytes / 1e9 / taken for name, taken in seconds.items()}
    return [
        row("device_encode_ratio", gbps["encode"], "GB/s", gbps["memcpy"], ""),
        row("device_apply_ratio", gbps["apply"], "GB/s", gbps["memcpy"], ""),
        row("device_scan_vs_copy", seconds["scan"] * 1e3, "ms", seconds["to_host"] * 1e3, ""),
    ]


def _fastest(works: dict[str, Callable[[], Any]], restore: Callable[[], Any], wait: Callable[[], Any]) -> dict[str, float]:
    """Seconds of the fastest of some runs of each, in turns, by the wall clock and with the device's work done."""
    fastest = dict.fromkeys(works, float("inf"))
    for _ in range(REPEATS):
        for name, work in works.items():
            restore()
            wait()
            started = time.perf_counter()
            work()
            wait()
            fastest[name] = min(fastest[name], time.perf_counter() - started)
    return fastest
