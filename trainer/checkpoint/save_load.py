"""What a checkpoint holds: model, optimizer, random state, and how far the run is.

The folder's layout is drawn in trainer/checkpoint/folder.py.
A checkpoint is a trusted file: Megatron's format holds pickles. Load only your own.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as torch_checkpoint

from trainer.checkpoint.folder import clear_unfinished, complete_and_prune, latest_checkpoint
from trainer.compat import cpu_compat
from trainer.model import parallel
from trainer.model.policy import Policy


class Progress(msgspec.Struct):
    """state.json: the step that is trained next and its version, the steps of the learning-rate schedule, and the lineage that saved it."""

    step: int
    version: int
    num_updates: int
    lineage: str = ""


def save_checkpoint(
    folder: str | Path,
    policy: Policy,
    step: int,
    version: int = 0,
    lineage: str = "",
    *,
    keep: int = 2,
    confirm: Callable[[], None] = lambda: None,
) -> None:
    """Write `folder`/step_N and point `folder`/latest at it once it is whole; the newest `keep` remain. Every rank calls it.

    A crash at any moment leaves the checkpoint before in place. confirm: asked on the main rank before anything is written and again
    before the checkpoint becomes the latest; when it raises, the one before stays.
    """
    target = Path(folder) / f"step_{step:08d}"
    building = target.with_name(target.name + ".part")
    if parallel.is_main_rank():
        confirm()
        clear_unfinished(Path(folder))
        building.mkdir(parents=True)
    dist.barrier()
    with cpu_compat.library_warnings_ignored():
        sharded, metadata = sharded_state(policy, is_loading=False)
        dist_checkpointing.save(sharded, str(building), WriteHere("torch_dist", 1), content_metadata=metadata)
    save_file(random_state(), building / f"random_{dist.get_rank():05d}.safetensors")
    dist.barrier()
    if parallel.is_main_rank():
        (building / "state.json").write_bytes(msgspec.json.encode(Progress(step, version, policy.num_updates, lineage)))
        confirm()
        complete_and_prune(building, target, keep)
    dist.barrier()


def load_checkpoint(folder: str | Path, policy: Policy) -> Progress | None:
    """Continue from the newest checkpoint under rank 0's `folder` exactly as if there had been no stop; every rank calls it.

    None, on every rank, when there is no checkpoint.
    """
    found = latest_checkpoint(folder) if parallel.is_main_rank() else None
    name = parallel.broadcast_bytes(found.name.encode() if found else None).decode()
    if not name:
        return None
    path = Path(folder) / name
    with cpu_compat.library_warnings_ignored():
        sharded, _ = sharded_state(policy, is_loading=True)
        loaded = dist_checkpointing.load(sharded, str(path), get_default_load_sharded_strategy(str(path)))
        policy.model.gpt.load_state_dict(loaded["model"])
        policy.optimizer.load_state_dict(loaded["optimizer"])
    files = sorted(path.glob("random_*.safetensors"))
    if len(files) == dist.get_world_size():
        restore_random_state(load_file(files[dist.get_rank()]))
    progress = msgspec.json.decode((path / "state.json").read_bytes(), type=Progress)
    policy.num_updates = progress.num_updates
    return progress


def sharded_state(policy: Policy, *, is_loading: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state dictionary whose tensors know their place in the whole model, and the metadata that goes with it."""
    allocate_adam(policy.optimizer)
    metadata = {"distrib_optim_sharding_type": "fully_reshardable", "singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    with_group = metadata | {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state: dict[str, Any] = {"model": policy.model.gpt.sharded_state_dict(metadata=with_group)}
    state["optimizer"] = policy.optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=with_group)
    return state, metadata


def allocate_adam(optimizer: Any) -> None:
    """Make Adam's state where it is not there yet: torch makes it at the first step, megatron asserts that it is there."""
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                if not part.optimizer.state[parameter]:
                    moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                    part.optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}


class WriteHere(torch_dist.TorchDistSaveShardedStrategy):
    """Writes in this process; megatron forks a writer and starts a manager process for each save: 2 s, and unsafe beside threads."""

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        by_key, _, _ = torch_dist._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        torch_checkpoint.save(
            torch_dist.mcore_to_pyt_state_dict(by_key, False),
            storage_writer=torch_checkpoint.FileSystemWriter(checkpoint_dir),
            planner=torch_dist.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def random_state() -> dict[str, torch.Tensor]:
    """Torch's generators and those of megatron's tracker (dropout), by name."""
    tracked = {f"tracker.{name}": state for name, state in tensor_parallel.get_cuda_rng_tracker().get_states().items()}
    return {name: state.clone() for name, state in ({"torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state()} | tracked).items()}


def restore_random_state(states: dict[str, torch.Tensor]) -> None:
    """The inverse of random_state."""
    torch.cuda.set_rng_state(states["cuda"])
    torch.set_rng_state(states["torch"])
    tracked = {name.removeprefix("tracker."): state for name, state in states.items() if name.startswith("tracker.")}
    tensor_parallel.get_cuda_rng_tracker().set_states(tracked)
