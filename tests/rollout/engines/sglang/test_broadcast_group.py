"""Rank 0 against an engine of a few lines that joins with torch.distributed as SGLang does."""

import asyncio
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from rollout.engines.sglang import weights
from rollout.engines.sglang.client import EngineClient
from rollout.engines.sglang.weights import BroadcastGroup, WeightCalls
from slimebus.bus.errors import WeightsError
from slimebus.weights.host.shared_folder import SharedTensor


class Peer:
    """Rank 1: what the engine's side of each call does."""

    def __init__(self, *, comes: bool = True, leaves_early: bool = False, refuses: bool = False) -> None:
        self.client = EngineClient("http://engine")
        self.comes, self.leaves_early, self.refuses = comes, leaves_early, refuses
        self.received = b""
        self.left: list[str] = []
        self._group: Any = None

    async def join_group(self, group: str, address: str, port: int, num_ranks: int) -> None:
        if self.comes:
            self._group = await asyncio.to_thread(self._join, group, address, port, num_ranks)
        else:
            await asyncio.sleep(30)

    def _join(self, name: str, address: str, port: int, num_ranks: int) -> Any:
        import torch.distributed as dist

        store = dist.TCPStore(address, port, num_ranks, False, timedelta(seconds=10))
        prefixed = dist.PrefixStore("cpu/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
        return dist.ProcessGroupGloo(prefixed, 1, num_ranks, timedelta(seconds=10))

    async def receive(self, tensors: list[SharedTensor], group: str, tag: str | None) -> None:
        if self.refuses:
            raise WeightsError("weights were refused: no update is open")
        if self.leaves_early:
            self._group = None
            await asyncio.sleep(30)
        size = sum(int(tensor.shape[0]) for tensor in tensors)
        self.received = await asyncio.to_thread(self._receive, size)

    def _receive(self, size: int) -> bytes:
        import torch
        import torch.distributed as dist

        found = torch.zeros(size, dtype=torch.uint8)
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._group.broadcast([found], options).wait()
        return found.numpy().tobytes()

    async def leave_group(self, group: str) -> None:
        self.left.append(group)


def group_of(peer: Peer) -> BroadcastGroup:
    calls: WeightCalls = peer  # type: ignore[assignment]
    return BroadcastGroup(calls, "127.0.0.1", 1)


def tensors(folder: Path) -> list[SharedTensor]:
    made = []
    for name, data in (("a", b"12345"), ("b", b"678")):
        (folder / name).write_bytes(bytes(64) + data)
        made.append(SharedTensor(name, "uint8", (len(data),), "", folder / name, 64))
    return made


def test_an_engine_that_joins_receives_the_tensors_one_after_another(tmp_path: Path) -> None:
    async def run() -> None:
        peer = Peer()
        group = group_of(peer)
        await group.open()
        for _ in range(2):
            await group.send(tensors(tmp_path), "L:1")
            assert peer.received == b"12345678"
            peer.received = b""
        await group.close()
        assert peer.left == [group.name]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"comes": False}, r"http://engine: no engine came to 127.0.0.1:\d+ within 1 s"),
        ({"leaves_early": True}, "the engine did not take its weights within 1 s"),
        ({"refuses": True}, "no update is open"),
    ],
    ids=["does not come", "dies in the middle", "refuses in words of its own"],
)
def test_an_engine_that_fails_ends_the_update_at_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: dict[str, bool], said: str
) -> None:
    monkeypatch.setattr(weights, "JOIN_TIMEOUT_S", 1.0 if "comes" in engine else 30.0)
    monkeypatch.setattr(weights, "SEND_TIMEOUT_S", 1.0)

    async def run() -> None:
        group = group_of(Peer(**engine))
        await group.open()
        await group.send(tensors(tmp_path), "L:1")

    began = time.monotonic()
    with pytest.raises(WeightsError, match=said):
        asyncio.run(run())
    assert time.monotonic() - began < 20
