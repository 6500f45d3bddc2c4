"""The calls of SGLang's HTTP API that change an engine's weights, and those that say what it has."""

import asyncio
from collections.abc import Sequence
from typing import Any

from rollout.engines.sglang.client import EngineClient
from slimebus.bus.errors import UsageError, WeightsError
from slimebus.weights.host.shared_folder import SharedTensor

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
        """Have the engine's ranks join a group of num_ranks processes, of which rank 0 is the one at address:port."""
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
