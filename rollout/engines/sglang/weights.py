"""How an engine with SGLang's API gets a version: a broadcast of the tensors that changed, or a directory.

From the start of a load the engine is paused; a failure leaves it so, and it is to be given everything then.

A broadcast is gloo over TCP: this process is rank 0 of a group, the engine's tensor-parallel ranks are 1, 2, ... The engine connects to a
port of this host to find us, and both sides then connect to each other. torch is imported here and nowhere else in a worker.
"""

import asyncio
import contextlib
import itertools
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from rollout.engines.sglang.client import EngineClient
from slimebus.bus.errors import ConfigError, SlimebusError, UsageError, WeightsError
from slimebus.process.launch import free_port
from slimebus.security.exposure import own_host
from slimebus.weights.host.shared_folder import SharedTensor, SharedVersion
from slimebus.weights.tensors import DTYPE_BYTES

UPDATE_TIMEOUT_S = 600.0
FLUSH_TRIES, FLUSH_PAUSE_S = 20, 0.1


class WeightCalls:
    """Every call raises WeightsError when the engine refuses it, Unreachable when it does not answer."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client

    async def begin(self) -> None:
        """Open an update. One that an earlier updater left open is closed first: what it loaded is all loaded again."""
        try:
            await self._post("/begin_weight_update", {})
        except WeightsError:
            await self._post("/end_weight_update", {})
            await self._post("/begin_weight_update", {})

    async def end(self) -> None:
        """Close the update."""
        await self._post("/end_weight_update", {})

    async def receive(self, tensors: Sequence[SharedTensor], group: str, tag: str | None) -> None:
        """Have the engine wait for the broadcast of one bucket and load it. tag: the new version's, with the last bucket only."""
        forms = {"names": [t.name for t in tensors], "dtypes": [t.dtype for t in tensors], "shapes": [list(t.shape) for t in tensors]}
        how = {"group_name": group, "load_format": "flattened_bucket", "weight_version": tag, "flush_cache": False}
        await self._post("/update_weights_from_distributed", forms | how)

    async def join_group(self, group: str, address: str, port: int, num_ranks: int) -> None:
        """Have the engine's ranks join a group of num_ranks processes, with rank 0 at address:port."""
        body = {"master_address": address, "master_port": port, "rank_offset": 1, "world_size": num_ranks}
        await self._post("/init_weights_update_group", body | {"group_name": group, "backend": "gloo"})

    async def leave_group(self, group: str) -> None:
        """Have the engine leave the group."""
        await self._post("/destroy_weights_update_group", {"group_name": group})

    async def rename(self, tag: str) -> None:
        """The weights stay, and are of this version from now on."""
        await self._post("/update_weight_version", {"new_version": tag, "abort_all_requests": False})

    async def flush(self) -> None:
        """Forget all keys and values that old weights made. Only while the engine is paused and keeps none of a running request."""
        for left in reversed(range(FLUSH_TRIES)):
            try:
                return await self.client.flush_cache()
            except UsageError as error:
                if left == 0:
                    raise WeightsError(f"keys and values of the old weights could not be forgotten: {error.text}") from None
                await asyncio.sleep(FLUSH_PAUSE_S)

    async def _post(self, path: str, body: dict[str, Any]) -> None:
        # Once: a bucket that arrived although its answer was lost is broadcast no second time.
        try:
            await self.client.post_once(path, body, timeout_s=UPDATE_TIMEOUT_S)
        except UsageError as error:
            raise WeightsError(f"weights were refused: {error.text}") from None


JOIN_TIMEOUT_S = 30.0
BUCKET_BYTES = 512 << 20
SEND_TIMEOUT_S = 120.0
"""Most time one bucket may take."""

LEAVE_TIMEOUT_S = 5.0

_numbers = itertools.count()


class BroadcastGroup:
    """One group with one engine. After any failure it cannot be used any more: close it, and make another."""

    def __init__(self, calls: WeightCalls, address: str, num_ranks: int) -> None:
        """address: this host's, as the engine reaches it; num_ranks: of the engine."""
        self.calls, self.address, self.num_ranks = calls, address, num_ranks
        self.name = f"slimebus-{socket.gethostname()[:24]}-{os.getpid()}-{next(_numbers)}"
        self._group: Any = None

    async def open(self) -> None:
        """Meet the engine. Raises WeightsError when it does not come within JOIN_TIMEOUT_S."""
        port = free_port()
        ours = asyncio.ensure_future(asyncio.to_thread(self._meet, port))
        theirs = asyncio.ensure_future(self.calls.join_group(self.name, self.address, port, 1 + self.num_ranks))
        self._group = await self._await_both(ours, theirs, f"no engine came to {self.address}:{port} within {JOIN_TIMEOUT_S:.0f} s")

    def _meet(self, port: int) -> Any:
        import torch.distributed as dist

        timeout = timedelta(seconds=JOIN_TIMEOUT_S)
        store = dist.TCPStore(self.address, port, 1 + self.num_ranks, True, timeout)
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=self.address)]
        options._timeout = timedelta(seconds=SEND_TIMEOUT_S)
        # The prefixes under which torch.distributed's own helper, which SGLang calls, lets the ranks of a group meet.
        prefixed = dist.PrefixStore("cpu/", dist.PrefixStore(f"{self.name}/", dist.PrefixStore(self.name, store)))
        return gloo(prefixed, 0, 1 + self.num_ranks, options)

    async def send(self, tensors: Sequence[SharedTensor], tag: str | None) -> None:
        """Give the engine one bucket; it has loaded it on return. Raises WeightsError, Unreachable."""
        largest_first = sorted(tensors, key=lambda tensor: -DTYPE_BYTES[tensor.dtype])  # so that none is misaligned
        ours = asyncio.ensure_future(asyncio.to_thread(self._broadcast, largest_first))
        theirs = asyncio.ensure_future(self.calls.receive(largest_first, self.name, tag))
        await self._await_both(ours, theirs, f"the engine did not take its weights within {SEND_TIMEOUT_S:.0f} s")

    def _broadcast(self, tensors: Sequence[SharedTensor]) -> None:
        import torch
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._group.broadcast([torch.from_numpy(np.concatenate([tensor.read() for tensor in tensors]))], options).wait()

    async def _await_both(self, ours: "asyncio.Future[Any]", theirs: "asyncio.Future[None]", why: str) -> Any:
        """What ours gives, once both are done. Of a failure the engine's words are raised rather than torch's."""
        try:
            await asyncio.wait({ours, theirs}, return_when=asyncio.FIRST_EXCEPTION)
            if theirs.done():
                theirs.result()
            found = await ours
            await theirs
            return found
        except RuntimeError as bad:  # torch.distributed's errors are this or derived from it
            raise WeightsError(f"{self.calls.client.url}: {why}: {str(bad).splitlines()[0]}") from None
        finally:
            theirs.cancel()
            ours.add_done_callback(lambda done: done.cancelled() or done.exception())  # its thread ends at its own deadline

    async def close(self) -> None:
        """Leave; the engine is asked to leave too, if it can be reached."""
        if self._group is not None:
            self._group = None
            with contextlib.suppress(SlimebusError, TimeoutError):
                await asyncio.wait_for(self.calls.leave_group(self.name), LEAVE_TIMEOUT_S)


def buckets(tensors: Iterable[SharedTensor], limit_bytes: int = BUCKET_BYTES) -> Iterator[list[SharedTensor]]:
    """The tensors in turn, in lists of at most limit_bytes, or of one tensor that is larger."""
    bucket: list[SharedTensor] = []
    room = limit_bytes
    for tensor in tensors:
        if bucket and tensor.size_bytes > room:
            yield bucket
            bucket, room = [], limit_bytes
        bucket.append(tensor)
        room -= tensor.size_bytes
    if bucket:
        yield bucket


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
        setting = "broadcast" if is_sglang and not has_replicas and not is_this_host(client.url) else "disk"
    elif setting == "broadcast" and (not is_sglang or has_replicas):
        why = "data-parallel replicas" if has_replicas else "the embedded engine"
        raise ConfigError(f"engine.weight_route is broadcast, but {why} at {client.url} can only load from a directory; set auto or disk")
    return WeightRoute(setting, num_ranks, is_sglang)


def is_this_host(url: str) -> bool:
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
