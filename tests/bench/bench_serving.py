"""From publish to serving: how long until an engine generates with a version, by stage.

A real store and weight server, a worker's WeightSync and the embedded engine in a process of its own, on one host without a broker
(announcing it costs a message). Two models of random weights in the shape of Qwen3: the quick start's, and one of half a billion
parameters. 2% of the values change from version to version.

    diff, encode, hash    the publisher finds what changed, writes it small, hashes the tensors
    wire                  the worker waits for manifest and bytes
    verify                it makes the tensors and checks their hashes, as far as that is not done beside the wire
    share, load           a version in shared memory, and the engine has it
"""

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from bench_row import Row, row

from rollout.embedded.model_config import EmbeddedModelConfig
from rollout.embedded.model_weights import expected_shapes
from rollout.engines.pool import EnginePool
from rollout.weights.sync import WeightSync
from slimebus.config.schema import RunConfig
from slimebus.weights.host.safetensors_file import WEIGHTS_FILE, write_file
from slimebus.weights.store.server import WeightServer
from slimebus.weights.store.version_store import VersionStore
from slimebus.weights.tensors import as_tensor

STAGES = ("diff", "encode", "hash", "wire", "verify", "share", "load")
CHANGED = 0.02
DEADLINE_S = 120.0

COMMON = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "eos_token_id": 1,
}
SMALL = {"vocab_size": 38, "hidden_size": 128, "num_hidden_layers": 3, "head_dim": 32, "intermediate_size": 256}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}
LARGE = {"vocab_size": 151936, "hidden_size": 1024, "num_hidden_layers": 24, "head_dim": 128, "intermediate_size": 3072}
LARGE |= {"num_attention_heads": 16, "num_key_value_heads": 8}

Tensors = dict[str, np.ndarray]


def rows(quick: bool) -> list[Row]:
    """One row for each model; quick measures the small one only. The reference is memcpy of the model's bytes."""
    found = [measure("publish_to_serving_s", SMALL, versions=20)]
    return found if quick else [*found, measure("publish_to_serving_0.5b_s", LARGE, versions=3)]


def measure(name: str, shape: dict[str, int], *, versions: int) -> Row:
    """The fastest of several versions after the first, which is pulled whole."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # a disk would only make the engine's start longer
    with tempfile.TemporaryDirectory(prefix="bench-serving-", dir=memory) as folder:
        tensors = make_model(Path(folder) / "model", COMMON | shape)
        taken = asyncio.run(serve(Path(folder), tensors, versions))
    fastest = min(taken, key=lambda stages: stages["total"])
    split = ", ".join(f"{stage} {fastest.get(stage, 0.0):.2g}" for stage in STAGES)
    return row(name, fastest["total"], f"s: {split}", copy_s(tensors), "")


def make_model(directory: Path, config: dict[str, Any]) -> Tensors:
    """A model directory of random weights; its tensors as bits of bfloat16."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    shapes = expected_shapes(EmbeddedModelConfig.read(directory))
    rng = np.random.default_rng(0)
    block = (rng.standard_normal(1 << 22, np.float32) * np.float32(0.02)).view(np.uint32) >> 16
    tensors = {name: np.resize(block.astype(np.uint16), shape) for name, shape in shapes.items()}
    write_file(directory / WEIGHTS_FILE, {name: as_tensor(name, tensor) for name, tensor in tensors.items()})
    return tensors


@asynccontextmanager
async def followed(engines: EnginePool, model: Path, shm: str) -> AsyncIterator[Callable[[Tensors], Awaitable[dict[str, float]]]]:
    """Started engines that follow a weight server: a function that publishes tensors and waits until they are served; seconds by stage."""
    changed, store = asyncio.Event(), VersionStore()
    sync = WeightSync(engines, model, shm=shm, pull_timeout_s=DEADLINE_S, on_change=changed.set)
    server, following = WeightServer(store), asyncio.create_task(sync.run())

    async def publish(tensors: Tensors) -> dict[str, float]:
        started = time.perf_counter()
        made = await asyncio.to_thread(store.publish, tensors)
        changed.clear()
        sync.announce(made.lineage, made.version, [server.endpoint], made.digest)
        await asyncio.wait_for(changed.wait(), DEADLINE_S)
        assert sync.serving == (made.lineage, made.version)
        return {**made.stage_s, **sync.stage_s, "total": time.perf_counter() - started}

    try:
        await engines.start()
        yield publish
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        sync.close()
        await engines.stop()
        server.close()


async def serve(folder: Path, tensors: Tensors, versions: int) -> list[dict[str, float]]:
    """Seconds of each stage, and in all, for each version after the first."""
    engines, steps, taken = EnginePool(RunConfig(), folder / "model", folder, name="bench"), change(tensors), []
    async with followed(engines, folder / "model", str(folder)) as publish:
        (folder / "model" / "model.safetensors").unlink()  # a model's size of memory that nobody needs any more
        for _ in range(versions + 1):
            taken.append(await publish(tensors))
            next(steps)
    return taken[1:]


def change(tensors: Tensors) -> Iterator[None]:
    """Each time, move about 2% of all values by one unit in the last place, other ones than before."""
    rng = np.random.default_rng(1)
    while True:
        for values in map(np.ravel, tensors.values()):  # views: the tensors are contiguous
            positions = np.cumsum(rng.geometric(CHANGED, int(len(values) * CHANGED) + 1))
            values[positions[positions < len(values)]] ^= 1
        yield


def copy_s(tensors: Tensors) -> float:
    """Seconds to copy the model once, on one core, into memory that is there already."""
    copies = {name: tensor.copy() for name, tensor in tensors.items()}
    times = []
    for _ in range(3):
        started = time.perf_counter()
        for name, tensor in tensors.items():
            np.copyto(copies[name], tensor)
        times.append(time.perf_counter() - started)
    return min(times)
