"""What a checkpoint holds of a policy, as boxes of whole tensors, which do not depend on the layout.

KEY              weights: fp32 from the optimizer where it holds them so, in its shards over data parallelism; buffers as they are
exp_avg.KEY      Adam's moments, [the same shape]
exp_avg_sq.KEY
reference.KEY    weights and buffers of a reference that was refreshed, as they are
random/RANK/...  torch's generators and those of megatron's tracker (dropout)

Keys, whole shapes and offsets are those of Megatron's sharded state; its checkpoint functions are not used
(docs/decisions/checkpoints-in-process.md).
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from trainer.checkpoint.boxes import Box, Shape, boxes_of_range
from trainer.model.learner import Learner

MOMENTS = ("exp_avg", "exp_avg_sq")
REFERENCE = "reference"


class LocalBox(NamedTuple):
    """This rank's entries of a whole tensor: `tensor` is a view of the box's entries, in order."""

    key: str
    whole: Shape
    offset: Shape
    shape: Shape
    tensor: torch.Tensor
    is_saved: bool
    """Whether this rank writes it: one of those that hold it does."""
    may_be_padded: bool
    """The whole shape depends on the layout (a vocabulary's padding): entries that were not saved keep what they are."""

    @property
    def box(self) -> Box:
        """Where it lies in the whole tensor."""
        return self.offset, self.shape


def contents(policy: Learner, *, has_reference: bool) -> Iterator[list[LocalBox]]:
    """All that a checkpoint holds but random states, to be saved or to be filled: each list before the next is asked for."""
    yield [*weights(policy), *optimizer_state(policy)]
    if policy.reference is not None and has_reference:
        with policy.reference.swapped_in():
            yield list(reference_weights(policy))


def weights(policy: Learner) -> Iterator[LocalBox]:
    """The model's parameters and buffers on this rank."""
    optimized = {parameter for part in optimizers(policy) for buffer in part.buffers for parameter in buffer.param_index_map}
    for entry in _sharded(policy):
        for piece in _pieces(entry):
            yield _local_box(piece, piece.data, is_saved=entry.data not in optimized and not any(_replica(piece)))


def reference_weights(policy: Learner) -> Iterator[LocalBox]:
    """The reference's parameters and buffers on this rank, while it is swapped in."""
    for entry in _sharded(policy):
        for piece in _pieces(entry):
            yield _local_box(piece, piece.data, is_saved=not any(_replica(piece)), name=REFERENCE)


def optimizer_state(policy: Learner) -> Iterator[LocalBox]:
    """This rank's shards of the trained weights and of Adam's moments."""
    by_parameter = {entry.data: entry for entry in _sharded(policy)}
    for part in optimizers(policy):
        for parameter, start, stop in shards(part):
            state = part._get_main_param_and_optimizer_states(parameter)
            for piece in _pieces(by_parameter[parameter]):
                first = piece.data.storage_offset() - parameter.storage_offset()
                begin, end = max(start, first), min(stop, first + piece.data.numel())
                is_saved = not any(_replica(piece)[:2]) and part.distributed_optimizer_instance_id == 0
                for name in ("param", *MOMENTS):
                    yield from _boxes(piece, name, state[name][begin - start : max(begin, end) - start], begin - first, is_saved)


def _boxes(piece: ShardedTensor, name: str, flat: torch.Tensor, start: int, is_saved: bool) -> Iterator[LocalBox]:
    """The boxes of entries start .. of a piece with the values `flat`."""
    at = 0
    for offset, shape in boxes_of_range(tuple(piece.local_shape), start, start + flat.numel()):
        size = math.prod(shape)
        yield _local_box(piece, flat[at : at + size], is_saved=is_saved, name=name, box=(offset, shape))
        at += size


def _local_box(piece: ShardedTensor, tensor: torch.Tensor, *, is_saved: bool, name: str = "param", box: Box | None = None) -> LocalBox:
    within, shape = box or ((0,) * len(piece.local_shape), tuple(piece.local_shape))
    added = piece.prepend_axis_num
    offset = tuple(a + b for a, b in zip(piece.global_offset, (0,) * added + within, strict=True))
    key = piece.key if name == "param" else f"{name}.{piece.key}"
    return LocalBox(key, tuple(piece.global_shape), offset, (1,) * added + shape, tensor, is_saved, piece.allow_shape_mismatch)


def _sharded(policy: Learner) -> list[Any]:
    """Megatron's entries for the model's tensors: ShardedTensors, and factories that make several of one tensor."""
    metadata = {"singleton_local_shards": False, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state = policy.model.gpt.sharded_state_dict(metadata=metadata)
    return [entry for entry in nested_values(state) if isinstance(entry, ShardedTensor | ShardedTensorFactory)]


def _pieces(entry: Any) -> list[ShardedTensor]:
    """The ShardedTensors of an entry, each a contiguous view of its tensor."""
    pieces = [entry] if isinstance(entry, ShardedTensor) else list(nested_values(entry.build()))
    storage = entry.data.untyped_storage().data_ptr()
    assert all(piece.data.is_contiguous() and piece.data.untyped_storage().data_ptr() == storage for piece in pieces), entry.key
    return pieces


def _replica(piece: ShardedTensor) -> tuple[int, ...]:
    return piece.replica_id if isinstance(piece.replica_id, tuple) else (piece.replica_id,)


def shards(part: Any) -> Iterator[tuple[torch.nn.Parameter, int, int]]:
    """The parameters that a distributed optimizer has entries of on this rank, and which of the flat parameter: start .. stop - 1."""
    for buffer in part.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"].start, ranges["param"].end


def optimizers(policy: Learner) -> list[Any]:
    """The distributed optimizers that have parameters on this rank, with Adam's state made: torch and Transformer Engine make it at the
    first step.
    """
    parts = [part for part in policy.optimizer.chained_optimizers if not getattr(part, "is_stub_optimizer", False)]
    for part in parts:
        _make_state(part)
    return parts


def _make_state(part: Any) -> None:
    for group in part.optimizer.param_groups:
        for parameter in group["params"]:
            state = part.optimizer.state[parameter]
            for name in MOMENTS:
                if name not in state:
                    state[name] = torch.zeros_like(parameter)
            if counts_by_parameter(part.optimizer):
                state.setdefault("step", torch.tensor(0.0))


def counts_by_parameter(adam: Any) -> bool:
    """Whether Adam's step count is a tensor in each parameter's state, as torch has it; Transformer Engine's FusedAdam has a number in
    each parameter group.
    """
    return isinstance(adam, torch.optim.Adam | torch.optim.AdamW)


def adam_step(policy: Learner) -> int:
    """How many steps Adam has made, 0 where this rank has no parameters."""
    counts = [0]
    for part in optimizers(policy):
        if counts_by_parameter(part.optimizer):
            counts += [int(state["step"]) for state in part.optimizer.state.values()]
        else:
            counts += [int(group.get("step", 0)) for group in part.optimizer.param_groups if group["params"]]
    return max(counts)


def set_adam_step(policy: Learner, step: int) -> None:
    """Let Adam go on after this many steps."""
    for part in optimizers(policy):
        if counts_by_parameter(part.optimizer):
            for state in part.optimizer.state.values():
                state["step"] = torch.tensor(float(step))
        else:
            for group in part.optimizer.param_groups:
                group["step"] = step


def layout() -> dict[str, int]:
    """Sizes of the parallel dimensions. Two trainers of one layout have the same ranks in the same roles."""
    return {
        "ranks": torch.distributed.get_world_size(),
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "context": parallel_state.get_context_parallel_world_size(),
        "expert": parallel_state.get_expert_model_parallel_world_size(),
        "expert tensor": parallel_state.get_expert_tensor_parallel_world_size(),
    }


def random_boxes(states: dict[str, torch.Tensor]) -> list[LocalBox]:
    """This rank's random_state, or the place of one."""
    key = f"random/{torch.distributed.get_rank():05d}"
    return [LocalBox(f"{key}/{name}", (len(of),), (0,), (len(of),), of, True, False) for name, of in states.items()]


def random_state() -> dict[str, torch.Tensor]:
    """Torch's generators and those of megatron's tracker (dropout), by name; [bytes] uint8 each."""
    tracked = {f"tracker.{name}": state for name, state in tensor_parallel.get_cuda_rng_tracker().get_states().items()}
    return {name: state.clone() for name, state in ({"torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state()} | tracked).items()}


def restore_random_state(states: dict[str, torch.Tensor]) -> None:
    """The inverse of random_state."""
    torch.cuda.set_rng_state(states["cuda"])
    torch.set_rng_state(states["torch"])
    tracked = {name.removeprefix("tracker."): state for name, state in states.items() if name.startswith("tracker.")}
    tensor_parallel.get_cuda_rng_tracker().set_states(tracked)
