"""Checkpoints: model, optimizer, random state, the number of updates, and a small dictionary of the caller's.

The folder's layout is drawn in trainer/checkpoint_folder.py.
A checkpoint is a trusted file: Megatron's format holds pickles. Load only your own.
"""

import contextlib
import json
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from safetensors.torch import load_file, save_file

from trainer import cuda_bridge, parallel
from trainer.checkpoint_folder import clear_unfinished, finish
from trainer.model import Model

SHARDING = "fully_reshardable"


def save_checkpoint(
    folder: str | Path, model: Model, optimizer: Any, state: dict[str, Any], *, keep: int, confirm: Callable[[], None] = lambda: None
) -> Path:
    """Write DIR/step_N for state["step"] = N and make it the latest; only the newest `keep` remain. Every rank calls it.

    Returns the folder. A crash at any moment leaves the checkpoint before in place. confirm: asked on the main rank before anything is
    written and again before the checkpoint becomes the latest; when it raises, the one before stays.
    """
    target = Path(folder) / f"step_{state['step']:08d}"
    building = target.with_name(target.name + ".part")
    if parallel.is_main_rank():
        confirm()
        clear_unfinished(Path(folder))
        building.mkdir(parents=True)
    dist.barrier()
    with cuda_bridge.library_warnings_ignored(), writing_in_this_process():
        sharded, metadata = sharded_state(model, optimizer, is_loading=False)
        strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
        dist_checkpointing.save(sharded, str(building), strategy, content_metadata=metadata)
    save_file(random_state(), building / f"random_{dist.get_rank():05d}.safetensors")
    dist.barrier()
    if parallel.is_main_rank():
        (building / "state.json").write_text(json.dumps(state))
        confirm()
        finish(building, target, keep)
    dist.barrier()
    return target


def load_checkpoint(path: Path, model: Model, optimizer: Any) -> dict[str, Any]:
    """Restore model, optimizer and random state from a checkpoint folder; returns its state. Every rank calls it."""
    with cuda_bridge.library_warnings_ignored():
        allocate_adam(optimizer)
        sharded, _ = sharded_state(model, optimizer, is_loading=True)
        loaded = dist_checkpointing.load(sharded, str(path), get_default_load_sharded_strategy(str(path)))
        model.gpt.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
    files = sorted(path.glob("random_*.safetensors"))
    if len(files) == dist.get_world_size():
        restore_random_state(load_file(files[dist.get_rank()]))
    return json.loads((path / "state.json").read_text())


def sharded_state(model: Model, optimizer: Any, *, is_loading: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state dictionary whose tensors know their place in the whole model, and the metadata that goes with it."""
    allocate_adam(optimizer)
    metadata = {"distrib_optim_sharding_type": SHARDING, "singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    group = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state: dict[str, Any] = {"model": model.gpt.sharded_state_dict(metadata=metadata | group)}
    state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata | group)
    return state, metadata


def allocate_adam(optimizer: Any) -> None:
    """Make Adam's state where it is not there yet: torch makes it at the first step, megatron asserts that it is there."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                if not part.optimizer.state[parameter]:
                    part.optimizer.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }


@contextlib.contextmanager
def writing_in_this_process() -> Iterator[None]:
    """Megatron forks a writer and starts a manager process for each save: 2 s, and unsafe beside the threads of sockets."""
    writer = filesystem_async.FileSystemWriterAsync
    make_queue, write = filesystem_async._get_write_results_queue, writer.write_preloaded_data_multiproc
    filesystem_async._get_write_results_queue = queue.Queue
    writer.write_preloaded_data_multiproc = staticmethod(write_buckets_here)
    try:
        yield
    finally:
        filesystem_async._get_write_results_queue = make_queue
        writer.write_preloaded_data_multiproc = staticmethod(write)


def write_buckets_here(transforms: Any, use_msc: bool, rank: int, buckets: list[Any], results: Any) -> None:
    """In place of write_preloaded_data_multiproc: the same writes, one after the other, with fsync."""
    written = {}
    for index, bucket in enumerate(buckets):
        outcome: queue.Queue[Any] = queue.Queue()
        running: queue.Queue[int] = queue.Queue()
        running.put(index)
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(transforms, index, bucket, outcome, running, True)
        _, written[index] = outcome.get_nowait()
        if isinstance(written[index], Exception):
            results.put(written[index])
            return
    results.put(written)


def random_state() -> dict[str, torch.Tensor]:
    """Torch's generators and those of megatron's tracker (dropout), by name."""
    tracked = tensor_parallel.get_cuda_rng_tracker().get_states()
    states = {"torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state()}
    return {name: value.clone() for name, value in {**states, **{f"tracker.{k}": v for k, v in tracked.items()}}.items()}


def restore_random_state(states: dict[str, torch.Tensor]) -> None:
    """The inverse of random_state."""
    torch.cuda.set_rng_state(states["cuda"])
    torch.set_rng_state(states["torch"])
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.set_states({name.removeprefix("tracker."): value for name, value in states.items() if name.startswith("tracker.")})
