"""Publication as every rank sees it: who serves which part, when a version is whole, and when nobody pulls any more.

rank 0        RankPart (its part) -> Coordinator: waits for the parts in the exchange, tells the broker
other owners  RankPart (its part) -> PartExchange
the rest      only help to merge tensor-parallel parts
"""

import logging
import os
import secrets
from collections import deque
from collections.abc import Sequence

from slimebus.bus.errors import ConfigError, FatalWeightsError
from slimebus.bus.messages import Publish
from slimebus.bus.transport.client import Client
from slimebus.client import connect
from slimebus.client.pull_keyring import PullKeyring
from slimebus.config import Resolved
from slimebus.security.exposure import is_local
from slimebus.telemetry.spans import Spans
from slimebus.weights.codec.delta_codec import codec_path
from slimebus.weights.files.disk_chain import DiskChain
from slimebus.weights.messages import VersionGone
from slimebus.weights.store.version_store import VersionStore
from slimebus.weights.tensors import Tensor, digest_of
from slimebus.weights.threads import num_threads
from trainer.model import parallel
from trainer.model.policy import Policy
from trainer.publish.part_exchange import PartExchange, RankPartReport
from trainer.publish.rank_part import RankPart

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
        """Of the newest complete version, over all parts; see `publish_metrics`."""

    def announce(self, version: int, own: RankPartReport) -> None:
        """Wait for the other parts, then tell the broker. Raises SlimebusError, naming the rank, when a part is unavailable."""
        parts = [own, *self.exchange.collect(version, self.others, PARTS_TIMEOUT_S)]
        forms = [form for part in parts if part.made for form in part.made.forms]
        if len({form.name for form in forms}) != len(forms):
            raise FatalWeightsError(f"version {version}: two ranks publish a tensor of one name")
        self.metrics = publish_metrics(version, parts)
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


def publish_metrics(version: int, parts: Sequence[RankPartReport]) -> dict[str, float]:
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


LAST_VERSION_S = 900.0
"""How long the last version may take to be announced, besides what rank 0 waits for the broker."""
KEPT_VERSIONS = 8
"""Versions that a direct delta can start from; older workers pull everything."""


class Publication:
    """This rank's side of a trainer timeline's versions. Every rank makes the same calls: begin, publish for each version, finish, close.

    client: rank 0's, which talks to the broker; None elsewhere. broker: its address, where another than the config's was given.
    """

    def __init__(self, resolved: Resolved, policy: Policy, client: Client | None, spans: Spans, broker: str | None = None) -> None:
        self.resolved, self.config, self.policy, self.spans = resolved, resolved.config, policy, spans
        self.broker = connect.broker_address(resolved, broker)
        self.lineage = ""
        self.part: RankPart | None = None
        self.coordinator: Coordinator | None = None
        self._client, self._exchange = client, PartExchange.in_process()
        self._key_client: Client | None = None

    def begin(self, version: int) -> None:
        """A new lineage, the same on all ranks, begins at `version`. Raises SlimebusError when this rank cannot serve its part."""
        disk = self.resolved.weights_dir
        self.lineage = parallel.broadcast_value(secrets.token_hex(6), str)
        owners, rank, weights = self.policy.export.owners, parallel.rank(), self.config.weights
        if rank not in owners:
            return
        place, chain, keyring = owners.index(rank), None, None
        if disk is not None:
            chain = DiskChain(disk, self.lineage, keep=KEPT_VERSIONS, part=place, parts=len(owners))
        if len(owners) > 1:
            self._exchange = PartExchange.among_ranks(self.lineage)
            if chain is None:
                check_reach(weights.weights_bind)
        if self._client is not None:
            keyring = PullKeyring.for_client(self._client)
            self.coordinator = Coordinator(self._client, self.lineage, self._exchange, owners[1:], chain)
        elif chain is None and self.resolved.keys_path is not None:
            self._key_client = connect.make_client(self.resolved, self.broker, role="trainer", name=f"trainer-rank{rank}")
            keyring = PullKeyring(self._key_client)
        store = VersionStore(
            keep=KEPT_VERSIONS,
            lineage=self.lineage,
            first_version=version,
            threads=num_threads(shared_by=int(os.environ.get("LOCAL_WORLD_SIZE", "1"))),
        )
        self.part = RankPart(self.config, store, keyring, self._report, place=place, broker=self.broker, chain=chain, spans=self.spans)
        part = f", part {place + 1} of {len(owners)}" if len(owners) > 1 else ""
        log.info("weights at %s%s, codec %s", self.part.address, part, codec_path())

    def publish(self, version: int) -> None:
        """The current weights as this version. Returns when this rank's part is copied out of the model."""
        tensors = self.policy.export.owned_tensors()
        if self.part is not None:
            self.part.publish(version, tensors)
        else:
            deque(tensors, maxlen=0)  # its part in merging what others publish

    def _report(self, version: int, part: RankPartReport) -> None:
        if self.coordinator is None:
            self._exchange.post(version, parallel.rank(), part)
        elif not part.problem:  # else it is raised where it is waited for
            with self.spans("announce", version=version):
                self.coordinator.announce(version, part)

    def on_heartbeat(self, lineage: str, version: int) -> None:
        """The broker's heartbeat, on rank 0: the newest version that it knows. Does not wait."""
        if self.coordinator is not None:
            self.coordinator.on_heartbeat(lineage, version)

    def metrics(self) -> dict[str, float]:
        """Of the newest complete version, on rank 0; see trainer/publish/publication.py."""
        return self.coordinator.metrics if self.coordinator is not None else {}

    @property
    def oldest_kept(self) -> int:
        """The oldest version that `kept_tensors` may have."""
        newest = self.part.store.newest if self.part is not None else None
        return max(0, newest.version - KEPT_VERSIONS) if newest else 0

    def kept_tensors(self, version: int) -> dict[str, Tensor] | None:
        """This rank's part of an older version, none on a rank that publishes nothing; None where it is no longer kept."""
        try:
            return self.part.store.restore(version) if self.part is not None else {}
        except VersionGone as gone:
            log.debug("%s", gone.text)
            return None

    def wait(self) -> None:
        """Until this rank's part of the last version is reported; on rank 0, until the version is announced. Raises what went wrong."""
        if self.part is not None:
            self.part.wait()

    def finish(self) -> None:
        """On rank 0: nobody pulls any more, all may leave. On another publishing rank: serve until it says so."""
        self.wait()
        if self.coordinator is not None:
            self._exchange.end()
        elif self.part is not None and not self._exchange.wait_for_end(self.config.rollout.generate_timeout_s + LAST_VERSION_S):
            log.warning("left before rank 0 said that the run is finished")

    def close(self) -> None:
        """Stop serving, at any time."""
        self._exchange.close()
        if self.part is not None:
            self.part.close()
        if self._key_client is not None:
            self._key_client.close(goodbye=False)


def check_reach(bind: str) -> None:
    """Raise ConfigError where a rank beyond the first host binds what only its own host reaches: no worker could have all parts."""
    if int(os.environ.get("GROUP_RANK", "0")) and is_local(bind):
        raise ConfigError(
            f"weights.weights_bind {bind} can only be reached from this host, but the trainer has publishing ranks on several; "
            "bind tcp://0.0.0.0:0 or an address of each host (docs/cluster.md)"
        )
