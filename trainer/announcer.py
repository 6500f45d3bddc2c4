"""Rank 0's last word on a version: every part is complete, so the broker is told."""

import logging
from collections.abc import Sequence

from slimebus.errors import WeightsError
from slimebus.messages import Publish
from slimebus.transport.client import Client
from slimebus.weights.disk_chain import DiskChain
from slimebus.weights.tensors import digest_of
from trainer.board import Board, Part

log = logging.getLogger("trainer")

PARTS_TIMEOUT_S = 600.0
"""As long as a version waits for the slowest rank to diff and encode its part."""
TELL_TIMEOUT_S = 600.0


class Announcer:
    """Announces the versions of a lineage. others: the ranks beside rank 0 that have a part, who post it on the board.

    chain: where all of them write their parts, when workers read those from a shared directory.
    """

    def __init__(self, client: Client, lineage: str, board: Board, others: Sequence[int], chain: DiskChain | None = None) -> None:
        self.client, self.lineage, self.board, self.others, self.chain = client, lineage, board, others, chain
        self._told: Publish | None = None
        self._metrics: dict[str, float] = {}

    def announce(self, version: int, own: Part) -> None:
        """Wait for the other parts, then tell the broker. Raises SlimebusError, naming the rank, when a part is not to be had."""
        parts = [own, *self.board.collect(version, self.others, PARTS_TIMEOUT_S)]
        tensors = [tensor for part in parts for tensor in part.tensors]
        if len({tensor.name for tensor in tensors}) != len(tensors):
            raise WeightsError(f"version {version}: two ranks publish a tensor of one name", retryable=False)
        self._metrics = measured(version, parts)
        digest, publishers = digest_of(tensors), [part.address for part in parts]
        if self.chain is not None:
            self.chain.announce(version, digest)
            publishers = [own.address]
        news = Publish(lineage=self.lineage, version=version, publishers=publishers, digest=digest)
        self.client.call(news, timeout_s=TELL_TIMEOUT_S)
        self._told = news
        if self.chain is not None:
            self.chain.collect(version)
        log.debug("version %d published in %d parts, %.1f%% changed", version, len(parts), 100 * self._metrics["changed_fraction"])

    def heard(self, lineage: str, version: int) -> None:
        """What the broker says is the newest. One that lost its last moments in a power cut is told again; does not wait."""
        told = self._told
        if told is not None and told.lineage == lineage and version < told.version:
            self.client.submit(told)

    def metrics(self) -> dict[str, float]:
        """Of the newest complete version, over all parts; see `measured`."""
        return self._metrics


def measured(version: int, parts: Sequence[Part]) -> dict[str, float]:
    """The fraction of values that changed, the size of the delta and of the model; in seconds, of the rank that took longest: encoding
    and its stages, and how long the step waited for the version before and for the copy out of the model.
    """
    slowest = max(parts, key=lambda part: part.encode_s)
    return {
        "version": float(version),
        "changed_fraction": sum(p.num_changed for p in parts) / max(1, sum(p.num_values for p in parts)),
        "delta_bytes": float(sum(p.delta_bytes for p in parts)),
        "total_bytes": float(sum(p.total_bytes for p in parts)),
        "encode_s": slowest.encode_s,
        **{f"publish_{stage}_s": seconds for stage, seconds in slowest.stage_s.items()},
        "wait_s": max(p.wait_s for p in parts),
        "copy_s": max(p.copy_s for p in parts),
    }
