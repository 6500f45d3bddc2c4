"""Rank 0 announces a version to the broker once every part is complete."""

import logging
from collections.abc import Sequence

from slimebus.bus.errors import FatalWeightsError
from slimebus.bus.messages import Publish
from slimebus.bus.transport.client import Client
from slimebus.weights.files.disk_chain import DiskChain
from slimebus.weights.tensors import digest_of
from trainer.publish.part_exchange import Part, PartExchange

log = logging.getLogger("trainer")

PARTS_TIMEOUT_S = 600.0
"""As long as a version waits for the slowest rank to diff and encode its part."""
PUBLISH_TIMEOUT_S = 600.0


class Coordinator:
    """Announces the versions of a lineage. others: the ranks beside rank 0 that have a part, who post it in the exchange.

    chain: where all of them write their parts, when workers read those from a shared directory.
    """

    def __init__(self, client: Client, lineage: str, exchange: PartExchange, others: Sequence[int], chain: DiskChain | None = None) -> None:
        self.client, self.lineage, self.exchange, self.others, self.chain = client, lineage, exchange, others, chain
        self._announced: Publish | None = None
        self.metrics: dict[str, float] = {}
        """Of the newest complete version, over all parts; see `measured`."""

    def announce(self, version: int, own: Part) -> None:
        """Wait for the other parts, then tell the broker. Raises SlimebusError, naming the rank, when a part is unavailable."""
        parts = [own, *self.exchange.collect(version, self.others, PARTS_TIMEOUT_S)]
        forms = [form for part in parts if part.made for form in part.made.forms]
        if len({form.name for form in forms}) != len(forms):
            raise FatalWeightsError(f"version {version}: two ranks publish a tensor of one name")
        self.metrics = measured(version, parts)
        digest, publishers = digest_of(forms), [part.address for part in parts]
        if self.chain is not None:
            self.chain.announce(version, digest)
            publishers = [own.address]
        news = Publish(lineage=self.lineage, version=version, publishers=publishers, digest=digest)
        self.client.call(news, timeout_s=PUBLISH_TIMEOUT_S)
        self._announced = news
        if self.chain is not None:
            self.chain.collect(version)
        log.debug("version %d published in %d parts, %.1f%% changed", version, len(parts), 100 * self.metrics["changed_fraction"])

    def on_heartbeat(self, lineage: str, version: int) -> None:
        """What the broker says is the newest. If it lost the last publish in a power cut, that is sent again; does not wait."""
        announced = self._announced
        if announced is not None and announced.lineage == lineage and version < announced.version:
            self.client.submit(announced)


def measured(version: int, parts: Sequence[Part]) -> dict[str, float]:
    """The fraction of values that changed, the size of the delta and of the model; in seconds, of the rank that took longest: encoding
    and its stages, and how long the step waited for the version before and for the copy out of the model.
    """
    made = [part.made for part in parts if part.made]
    slowest = max(made, key=lambda part: part.encode_s)
    return {
        "version": float(version),
        "changed_fraction": sum(part.num_changed for part in made) / max(1, sum(part.num_values for part in made)),
        "delta_bytes": float(sum(part.delta_bytes for part in made)),
        "total_bytes": float(sum(part.total_bytes for part in made)),
        "encode_s": slowest.encode_s,
        **{f"publish_{stage}_s": seconds for stage, seconds in slowest.stage_s.items()},
        "wait_s": max(part.wait_s for part in parts),
        "copy_s": max(part.copy_s for part in parts),
    }
