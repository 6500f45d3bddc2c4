"""Versions of the policy, served to workers: copied out of the model, then diffed and announced beside the next step."""

import logging
import secrets
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimebus.config.schema import WeightsConfig
from slimebus.messages import Publish
from slimebus.security.pullers import Pullers
from slimebus.spans import Spans
from slimebus.transport.client import Client
from slimebus.weights.disk_chain import DiskChain
from slimebus.weights.link import advertised, with_key
from slimebus.weights.server import WeightServer
from slimebus.weights.store import VersionInfo, VersionStore

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

log = logging.getLogger("trainer")


class Publisher:
    """The weight server of one trainer timeline (`lineage`), or its chain of files under `disk`; used by rank 0."""

    def __init__(self, client: Client, config: WeightsConfig, first_version: int, spans: Spans, *, disk: Path | None = None) -> None:
        self.client, self.spans = client, spans
        self.pullers = Pullers(client)
        self.lineage = secrets.token_hex(6)
        self.chain: DiskChain | None = None
        self.server: WeightServer | None = None
        self.store = VersionStore(keep=config.weights_keep, lineage=self.lineage, first_version=first_version, zstd=config.weights_zstd)
        if disk is not None:
            self.chain = DiskChain(disk, self.lineage, keep=config.weights_keep)
            self.address = self.chain.address
        else:
            keyring, degree = self.pullers.keyring, config.weights_fanout
            self.server = WeightServer(self.store, bind=config.weights_bind, keyring=keyring, degree=degree)
            self.address = with_key(advertised(self.server.endpoint, config.weights_advertise), self.pullers.public)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._pending: Future[None] | None = None
        self._newest: VersionInfo | None = None
        self._told: Publish | None = None

    def publish(self, tensors: "Iterable[tuple[str, torch.Tensor]]") -> None:
        """Make the next version from these tensors. Returns once they are copied; the rest goes on beside training."""
        copied = {name: _copy(tensor) for name, tensor in tensors}
        with self.spans("wait for publisher"):  # the version before must be out: one copy more is never held
            self.wait()
        self._pending = self._thread.submit(self._announce, copied)

    def _announce(self, copied: dict[str, Any]) -> None:
        with self.spans("encode") as work:
            made = self.store.publish(copied)
            work.about |= {"version": made.version, "delta_bytes": made.delta_bytes}
        self._newest = made
        if self.chain is not None:
            self.chain.publish(self.store)
        news = Publish(lineage=made.lineage, version=made.version, publishers=[self.address], digest=made.digest)
        self.client.call(news, timeout_s=600.0)
        self._told = news
        log.debug("version %d published, %.1f%% of the values changed", made.version, 100 * made.changed_fraction)

    def heard(self, lineage: str, version: int) -> None:
        """What the broker says is the newest. One that lost its last moments in a power cut is told again; does not wait."""
        told = self._told
        if told is not None and told.lineage == lineage and version < told.version:
            self.client.submit(told)

    def metrics(self) -> dict[str, float]:
        """Of the newest announced version: the fraction of values that changed, its delta's size and the model's, seconds to encode."""
        made = self._newest
        if made is None:
            return {}
        return {
            "version": float(made.version),
            "changed_fraction": made.changed_fraction,
            "delta_bytes": float(made.delta_bytes),
            "total_bytes": float(made.total_bytes),
            "encode_s": made.encode_s,
        }

    def wait(self) -> None:
        """Until the last publish is announced. Raises what made it fail."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def close(self) -> None:
        """Stop serving. An announcement that the broker has not heard is not waited for; `wait` does that."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self.server is not None:
            self.server.close()


def _copy(tensor: "torch.Tensor") -> "NDArray[np.uint16]":
    """The tensor as bfloat16 bits that later updates do not touch."""
    import torch

    from slimebus.weights.rounding import to_bf16

    bits = to_bf16(tensor)
    return bits.copy() if tensor.dtype == torch.bfloat16 else bits  # rounding copies; bfloat16 may be a view of the live weights
