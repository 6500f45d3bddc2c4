"""Decodes the bytes that a pull received, and verifies each tensor by the hashes of its publisher."""

import functools
from collections.abc import Iterable
from concurrent.futures import Future, wait

import numpy as np
from blake3 import blake3

from slimebus.bus.errors import WeightsError
from slimebus.weights.codec import delta_codec
from slimebus.weights.pull.plan import TensorDownload
from slimebus.weights.tensors import checksum, hash_bytes
from slimebus.weights.threads import Threads

MIN_POOLED_BYTES = 1 << 18
"""Smaller tensors are verified sooner than another thread would begin."""


def verify_tensor(download: TensorDownload, threads: Threads | None = None) -> bool:
    """Make the tensor from its payload; True when its hash is the publisher's. Changes only the buffers of the download.

    threads: for units of it.
    """
    if download.base is None:
        return hash_bytes(download.payload.data) == download.form.hash
    if checksum(download.payload.data) != download.entry.payload_hash:
        return False
    made = blake3()
    try:
        delta_codec.apply(
            download.payload,
            download.result.view(np.uint16),
            base=download.base.tensor.steps,
            on_unit=lambda values: made.update(values.view(np.uint8).data),
            threads=threads,
        )
    except WeightsError:
        return False
    return made.hexdigest() == download.form.hash


class Verifications:
    """Verifies completed downloads, large ones in threads while more arrives."""

    def __init__(self, threads: Threads, unit_threads: Threads) -> None:
        self._threads = threads
        self._verify = functools.partial(verify_tensor, threads=unit_threads)
        self._running: list[tuple[TensorDownload, Future[bool]]] = []

    def start(self, downloads: Iterable[TensorDownload]) -> None:
        """Begin to verify these."""
        for download in downloads:
            threads = self._threads if download.form.size >= MIN_POOLED_BYTES else Threads()
            self._running.append((download, threads.submit(self._verify, download)))

    def wait(self) -> None:
        """Until nothing is being verified any more."""
        wait([check for _, check in self._running])

    def finished(self) -> list[tuple[TensorDownload, bool]]:
        """Each verdict once, right ones first."""
        checks = [(download, check, check.done()) for download, check in self._running]
        self._running = [(download, check) for download, check, is_done in checks if not is_done]
        return sorted(((download, check.result()) for download, check, is_done in checks if is_done), key=lambda verdict: not verdict[1])
