"""How many ranks a layout takes."""

from slimebus.bus.errors import ConfigError
from slimebus.cli.config import RunConfig
from trainer.arguments.options import read_options


def expert_ranks(config: RunConfig) -> tuple[int, int]:
    """Expert parallel and expert tensor parallel size: 1 unless given, also where tensor parallelism is not."""
    values = read_options(config.megatron).values
    return values.get("expert_model_parallel_size") or 1, values.get("expert_tensor_parallel_size") or 1


def check_layout(config: RunConfig, world_size: int) -> None:
    """Raise ConfigError unless the ranks divide by tensor x pipeline x context, and by expert tensor x pipeline x expert."""
    t = config.trainer
    pipeline, (experts, expert_tensor) = t.pipeline_model_parallel_size, expert_ranks(config)
    inner = {
        "context": (t.tensor_model_parallel_size, t.context_parallel_size),
        "expert": (expert_tensor, experts),
    }
    for kind, (tensor, size) in inner.items():
        ranks = tensor * pipeline * size
        if world_size % ranks:
            split = {"tensor": t.tensor_model_parallel_size, "expert tensor": expert_tensor if kind == "expert" else 1}
            split |= {"pipeline": pipeline, kind: size}
            above_1 = " or ".join(name for name, of in split.items() if of > 1 and (name, kind) != ("tensor", "expert"))
            raise ConfigError(
                f"{world_size} trainer ranks do not divide by {ranks} = tensor {tensor} x pipeline {pipeline} x {kind} {size};"
                f" start a multiple of {ranks} (--nproc-per-node, --nnodes), or lower {above_1} parallelism"
            )
