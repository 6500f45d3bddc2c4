"""What one engine has, and how it gets the next version: a broadcast of the tensors that changed, or a directory.

unknown --update: everything--> known --update: what changed--> known
   ^------------------------- any failure -------------------------'

From the start of an update the engine is paused; a failure leaves it paused and out of service until an update of everything succeeds.
"""

from collections.abc import Mapping
from typing import Literal

from rollout.engines.client import EngineClient
from rollout.weights.broadcast_group import BroadcastGroup, buckets
from rollout.weights.calls import WeightCalls
from rollout.weights.route import Kind, WeightRoute, find_route
from slimebus.bus.errors import WeightsError
from slimebus.security.exposure import own_host
from slimebus.weights.host.shared_folder import SharedTensor, SharedVersion

PauseMode = Literal["in_place", "retract", "abort"]


def version_tag(lineage: str, version: int) -> str:
    """What an engine is told its weight version is."""
    return f"{lineage}:{version}"


class EngineWeights:
    """Moves one engine from version to version. `tag` is the version that it verifiably serves, "" for none or unknown."""

    def __init__(self, client: EngineClient, *, pause_mode: PauseMode, route: Kind | Literal["auto"]) -> None:
        """route: engine.weight_route."""
        self.client, self.calls = client, WeightCalls(client)
        self.pause_mode, self.route_setting = pause_mode, route
        self.tag = ""
        self.cache_key = ""
        """For requests: keys and values are shared among those that were sent after the same update."""
        self.is_whole = True
        """False from an update that was begun until one is finished."""
        self.sent_tensors = self.sent_bytes = 0
        self._hashes: Mapping[str, str] = {}
        self._route: WeightRoute | None = None
        self._group: BroadcastGroup | None = None

    def serves(self, version: SharedVersion) -> bool:
        """Whether this is the version that the engine verifiably serves."""
        return self.tag == version_tag(version.lineage, version.version)

    def invalidate(self) -> None:
        """What it has is unknown."""
        self.is_whole, self.tag, self._hashes = False, "", {}

    async def update(self, version: SharedVersion) -> None:
        """The engine serves exactly this version; on WeightsError or Unreachable it is paused and out of service until a later update."""
        tag = version_tag(version.lineage, version.version)
        before, self.tag = self.tag, ""
        try:
            is_known = before != "" and await self.client.weight_version() == before
            if not is_known:
                self._route = None
                await self.close()
            if not (is_known and before == tag):
                await self._update(version, tag, self._hashes if is_known else {})
        except BaseException:
            self.invalidate()
            await self.close()
            raise
        self.is_whole, self.tag = True, tag
        self._hashes = {name: tensor.hash for name, tensor in version.tensors.items()}

    async def _update(self, version: SharedVersion, tag: str, known: Mapping[str, str]) -> None:
        route = self._route = self._route or await find_route(self.client, self.route_setting)
        await self.client.pause(self.pause_mode)
        self.cache_key = tag
        changed = [tensor for name, tensor in version.tensors.items() if known.get(name) != tensor.hash and tensor.size_bytes]
        if route.kind == "disk":
            await self.client.update_weights_from_disk(str(version.directory), tag)
        elif changed:
            await self._send(changed, route, tag)
        else:
            await self.calls.rename(tag)
        if self.pause_mode != "in_place" and route.is_sglang:
            await self.calls.flush()
        if (served := await self.client.weight_version()) != tag:
            raise WeightsError(f"engine at {self.client.url} reports weights {served!r} after an update to {tag!r}", code="unverified")
        if route.is_sglang and await self.client.is_ready():  # the embedded one swaps to a version atomically
            text = f"engine at {self.client.url} was resumed by somebody else while it was updated to {tag!r}"
            raise WeightsError(text, code="unverified")
        await self.client.resume()

    async def _send(self, changed: list[SharedTensor], route: WeightRoute, tag: str) -> None:
        if self._group is None:
            self._group = BroadcastGroup(self.calls, own_host(self.client.url).strip("[]"), route.num_ranks)
            await self._group.open()
        await self.calls.begin()
        waiting = list(buckets(changed))
        while waiting:
            bucket = waiting.pop(0)
            await self._group.send(bucket, None if waiting else tag)
            self.sent_tensors += len(bucket)
            self.sent_bytes += sum(tensor.size_bytes for tensor in bucket)
        await self.calls.end()

    async def close(self) -> None:
        """Leave the broadcast group, if there is one."""
        group, self._group = self._group, None
        if group is not None:
            await group.close()
