"""Publishing as every rank sees it: who serves which part, when a version is whole, and when nobody pulls any more.

rank 0        Publisher (its part) -> Announcer: waits for the parts on the board, tells the broker
other owners  Publisher (its part) -> board
the rest      only help to merge tensor-parallel parts
"""

import logging
import os
import secrets

from slimebus import joining
from slimebus.config import Resolved
from slimebus.errors import ConfigError
from slimebus.security.exposure import is_local
from slimebus.security.pullers import Pullers
from slimebus.spans import Spans
from slimebus.transport.client import Client
from slimebus.weights.codec import codec_path
from slimebus.weights.cores import num_threads
from slimebus.weights.disk_chain import DiskChain
from slimebus.weights.store import VersionStore
from trainer import parallel
from trainer.announcer import Announcer
from trainer.board import Board, Part
from trainer.policy import Policy
from trainer.publisher import Publisher

log = logging.getLogger("trainer")


class Publishing:
    """This rank's side of a trainer timeline's versions. Every rank makes the same calls: begin, publish for each version, finish, close.

    client: rank 0's, which talks to the broker; None elsewhere. broker: its address, where another than the config's was given.
    """

    def __init__(self, resolved: Resolved, policy: Policy, client: Client | None, spans: Spans, broker: str | None = None) -> None:
        self.resolved, self.config, self.policy, self.spans = resolved, resolved.config, policy, spans
        self.broker = joining.broker_address(resolved, broker)
        self.lineage = ""
        self.publisher: Publisher | None = None
        self.announcer: Announcer | None = None
        self.pullers: Pullers | None = None
        self._client, self._board = client, Board.in_process()
        self._key_client: Client | None = None

    def begin(self, version: int) -> None:
        """A new lineage, the same on all ranks, begins at `version`. Raises SlimebusError when this rank cannot serve its part."""
        is_main, disk = self.policy.is_main, self.resolved.weights_dir
        self.lineage = parallel.broadcast_bytes(secrets.token_hex(6).encode() if is_main else None).decode()
        owners, rank, weights = self.policy.owners(), parallel.rank(), self.config.weights
        if rank not in owners:
            return
        place, chain = owners.index(rank), None
        if disk is not None:
            chain = DiskChain(disk, self.lineage, keep=weights.weights_keep, part=place, parts=len(owners))
        if len(owners) > 1:
            self._board = Board.among_ranks(self.lineage)
            if chain is None:
                check_reach(weights.weights_bind)
        if self._client is not None:
            self.pullers = Pullers(self._client)
            self.announcer = Announcer(self._client, self.lineage, self._board, owners[1:], chain)
        elif chain is None and self.resolved.keys_path is not None:
            self._key_client = joining.client_of(self.resolved, self.broker, role="trainer", name=f"trainer-rank{rank}")
            self.pullers = Pullers(self._key_client)
            self.pullers.follow(self.config.broker.heartbeat_s)
        store = VersionStore(
            keep=weights.weights_keep,
            lineage=self.lineage,
            first_version=version,
            zstd=weights.weights_zstd,
            threads=num_threads(weights.weights_threads, shared_by=int(os.environ.get("LOCAL_WORLD_SIZE", "1"))),
        )
        self.publisher = Publisher(weights, store, self.pullers, self._tell, place=place, broker=self.broker, chain=chain, spans=self.spans)
        part = f", part {place + 1} of {len(owners)}" if len(owners) > 1 else ""
        log.info("weights at %s%s, codec %s", self.publisher.address, part, codec_path())

    def publish(self, version: int) -> None:
        """The current weights as this version. Returns when this rank's part is copied out of the model."""
        tensors = self.policy.owned_tensors()
        if self.publisher is not None:
            self.publisher.publish(version, tensors)
        else:
            for _ in tensors:
                pass

    def _tell(self, version: int, part: Part) -> None:
        if self.announcer is None:
            self._board.post(version, parallel.rank(), part)
        elif not part.problem:  # else it is raised where it is waited for
            with self.spans("announce", version=version):
                self.announcer.announce(version, part)

    def heard(self, lineage: str, version: int) -> None:
        """The broker's heartbeat, on rank 0: the newest version that it knows; a chance to ask whose keys may pull. Does not wait."""
        if self.announcer is not None and self.pullers is not None:
            self.pullers.refresh()
            self.announcer.heard(lineage, version)

    def metrics(self) -> dict[str, float]:
        """Of the newest complete version, on rank 0; see trainer/announcer.py."""
        return self.announcer.metrics() if self.announcer is not None else {}

    def wait(self) -> None:
        """Until this rank's part of the last version is told of; on rank 0, until the version is announced. Raises what went wrong."""
        if self.publisher is not None:
            self.publisher.wait()

    def finish(self) -> None:
        """On rank 0: nobody pulls any more, all may leave. On another publishing rank: serve until it says so."""
        self.wait()
        if self.announcer is not None:
            self._board.end()
        elif self.publisher is not None and not self._board.wait_for_end(self._longest_end_s()):
            log.warning("left before rank 0 said that the run is finished")

    def _longest_end_s(self) -> float:
        """Rank 0 waits so long for the broker's word, and a while for the last version to be announced."""
        return self.config.broker.finish_wait_s + self.config.rollout.generate_timeout_s + 900.0

    def close(self) -> None:
        """Stop serving, at any time."""
        self._board.close()
        if self.publisher is not None:
            self.publisher.close()
        if self.pullers is not None:
            self.pullers.close()
        if self._key_client is not None:
            self._key_client.close(goodbye=False)


def check_reach(bind: str) -> None:
    """Raise ConfigError where a rank beyond the first host binds what only its own host reaches: no worker could have all parts."""
    if int(os.environ.get("GROUP_RANK", "0")) and is_local(bind):
        raise ConfigError(
            f"weights.weights_bind {bind} can only be reached from this host, but the trainer has publishing ranks on several; "
            "bind tcp://0.0.0.0:0 or an address of each host (docs/operations.md)"
        )
