"""How an engine with SGLang's API gets a version: a broadcast of the tensors that changed, or a directory.

From the start of a load the engine is paused; a failure leaves it so, and it is to be given everything then.
"""

import contextlib
import socket
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from rollout.engines.sglang.broadcast_group import BroadcastGroup, buckets
from rollout.engines.sglang.calls import WeightCalls
from rollout.engines.sglang.client import EngineClient
from slimebus.bus.errors import ConfigError, WeightsError
from slimebus.security.exposure import own_host
from slimebus.weights.host.shared_folder import SharedTensor, SharedVersion

PauseMode = Literal["in_place", "retract", "abort"]
Kind = Literal["disk", "broadcast"]
EMBEDDED = "slimebus"
"""How the version of an embedded engine begins, in /server_info."""


class SGLangEngine(EngineClient):
    """A client that moves its engine from version to version."""

    def __init__(self, url: str, *, pause_mode: PauseMode, route: Kind | Literal["auto"], **options: Any) -> None:
        """route: engine.weight_route. options: EngineClient's."""
        super().__init__(url, **options)
        self.calls, self.pause_mode, self.route_setting = WeightCalls(self), pause_mode, route
        self.sent_tensors = self.sent_bytes = 0
        self._hashes: Mapping[str, str] = {}
        self._route: WeightRoute | None = None
        self._group: BroadcastGroup | None = None

    async def load(self, version: SharedVersion, base: str) -> None:
        """As `backends.EngineApi.load` says."""
        known, self._hashes = self._hashes, {}
        try:
            if not (base and await self.weight_version() == base):
                known, self._route = {}, None
                await self._leave_group()
            await self._load(version, known)
        except BaseException:
            await self._leave_group()
            raise
        self._hashes = {name: tensor.hash for name, tensor in version.tensors.items()}

    async def _load(self, version: SharedVersion, known: Mapping[str, str]) -> None:
        tag = version.tag
        route = self._route = self._route or await find_route(self, self.route_setting)
        await self.pause(self.pause_mode)
        changed = [tensor for name, tensor in version.tensors.items() if known.get(name) != tensor.hash and tensor.size_bytes]
        if route.kind == "disk":
            await self.update_weights_from_disk(str(version.directory), tag)
        elif changed:
            await self._broadcast(changed, route, tag)
        else:
            await self.calls.rename(tag)
        if self.pause_mode != "in_place" and route.is_sglang:
            await self.calls.flush()
        if (served := await self.weight_version()) != tag:
            raise WeightsError(f"engine at {self.url} reports weights {served!r} after an update to {tag!r}", code="unverified")
        if route.is_sglang and await self.is_ready():  # the embedded one swaps to a version atomically
            text = f"engine at {self.url} was resumed by somebody else while it was updated to {tag!r}"
            raise WeightsError(text, code="unverified")
        await self.resume()

    async def _broadcast(self, changed: list[SharedTensor], route: "WeightRoute", tag: str) -> None:
        if self._group is None:
            self._group = BroadcastGroup(self.calls, own_host(self.url).strip("[]"), route.num_ranks)
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
        """Leave the broadcast group, if there is one, and close the connections."""
        await self._leave_group()
        await super().close()

    async def _leave_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            await group.close()


class WeightRoute(NamedTuple):
    """kind: how tensors go there; num_ranks: processes of the engine that each need them; is_sglang: not the embedded engine."""

    kind: Kind
    num_ranks: int
    is_sglang: bool


async def find_route(client: EngineClient, setting: Kind | Literal["auto"]) -> WeightRoute:
    """The route to an engine that is up, as engine.weight_route says. Raises ConfigError for one that it cannot take."""
    about = await client.server_info()
    is_sglang = not str(about.get("version", "")).startswith(EMBEDDED)
    num_ranks = int(about.get("tp_size") or 1) * int(about.get("pp_size") or 1)
    has_replicas = int(about.get("dp_size") or 1) > 1  # SGLang takes no tensors then
    if setting == "auto":
        setting = "broadcast" if is_sglang and not has_replicas and not is_here(client.url) else "disk"
    elif setting == "broadcast" and (not is_sglang or has_replicas):
        why = "data-parallel replicas" if has_replicas else "the embedded engine"
        raise ConfigError(f"engine.weight_route is broadcast, but {why} at {client.url} can only load from a directory; set auto or disk")
    return WeightRoute(setting, num_ranks, is_sglang)


def is_here(url: str) -> bool:
    """Whether the host of this URL is an address of this machine. Nothing is sent."""
    host = urlsplit(url).hostname or ""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except socket.gaierror:
        return False
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return True
    return False
