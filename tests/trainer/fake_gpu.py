"""What a GPU would show of devices, names and sizes, on a machine without one; a process of its own, without the bridge for CPUs.

    fake_gpu.py step FOLDER...   forward and backward of packed rows on a device that is not the CPU, every tensor a FakeTensor, of each
                                 model; and the loss of each algorithm and correction
    fake_gpu.py ranks FOLDER     64 ranks of tensor 4 x pipeline 2 x expert 4, one after the other, of a fake process group

Backward asks for the context of its device, which `cuda` has only where there is a GPU, whichever build of torch it is; a device named
`gpu`, registered here, takes its place everywhere. On a FakeTensor an operation with tensors of two devices raises, and so does whatever
reads a value back to the host (item, nonzero, a mask as an index): a step that ends here waits for the device nowhere.
"""

import json
import os
import sys
import types
import warnings
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

warnings.simplefilter("ignore")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

DEVICE = torch.device("cpu")
if sys.argv[1] == "step":
    import torch._dynamo  # builds its tables of torch names once, and must see the originals
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    from trainer.compat.cpu_compat import bridge_random_state, bridge_streams, compiles_nothing, renew_collectives

    _setup_privateuseone_for_python_backend("gpu")
    DEVICE = torch.device("gpu", 0)
    renew_collectives(dist)
    torch.compile = compiles_nothing
    bridge_streams(torch)
    bridge_random_state(torch)
    torch.cuda.current_device = lambda: DEVICE
    torch.nn.Module.cuda = lambda self, *args: self
    torch.Tensor.pin_memory = lambda self, *args: self  # has no fake form
else:
    from trainer.compat import cpu_compat

    cpu_compat.import_megatron()

import megatron.core.optimizer  # noqa: E402, F401
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from slimebus.bus.errors import ConfigError  # noqa: E402
from slimebus.bus.samples import Sample  # noqa: E402
from slimebus.config import RunConfig  # noqa: E402
from slimebus.config.schema import AlgorithmConfig, BrokerConfig, TrainerConfig  # noqa: E402
from trainer.batches.batch import TrainingGroup  # noqa: E402
from trainer.batches.packing import RankLayout, pack  # noqa: E402
from trainer.critic.critic import loss_of_values  # noqa: E402
from trainer.model import gpt, hf_export, parallel, update  # noqa: E402
from trainer.objective.aggregation import masked_sum  # noqa: E402
from trainer.objective.build_objective import build_objective  # noqa: E402
from trainer.objective.plugin_settings import plugin_names  # noqa: E402
from trainer.objective.row import DeviceColumns, Row  # noqa: E402

sys.path.append(str(Path(__file__).parents[1] / "fixtures"))
from mixed_batch import mixed_batch  # noqa: E402

parallel.device = lambda: DEVICE
parallel.gather = lambda value, form: [value]  # no other rank exists, and the fake device computes nothing
options_here = gpt.transformer_options
as_on_cuda = {"use_cpu_initialization": False, "perform_initialization": False}  # parameters are made on the device
gpt.transformer_options = lambda: options_here() | as_on_cuda
make_gpt = gpt.make_gpt


def make_on_device(*args: Any) -> Any:
    """All parameters are made where `to` would move them."""
    with DEVICE:
        return make_gpt(*args)


gpt.make_gpt = make_on_device
gpt.load_weights = lambda *args: None
gpt.DistributedDataParallel = lambda settings, options, module: module  # its buffers become the parameters' data, which fakes cannot
# all is there, in its dtype, and FakeTensors cannot be swapped
torch.nn.Module.to = torch.nn.Module.bfloat16 = lambda self, *args, **kwargs: self


INIT, NEW_GROUP = dist.init_process_group, dist.new_group


def start(config: RunConfig, rank: int, size: int) -> None:
    """Rank `rank` of so many that do not exist."""
    dist.init_process_group = lambda backend, **options: INIT("fake", store=FakeStore(), rank=rank, world_size=size)
    dist.new_group = lambda ranks=None, *, backend=None, **options: NEW_GROUP(ranks, backend="fake", **options)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    parallel.start(config, {})


def groups() -> list[TrainingGroup]:
    """Two groups of three samples of different lengths and temperatures."""

    def sample(length: int, reward: float) -> Sample:
        return Sample(
            tokens=np.arange(length, dtype=np.int32) % 38,
            loss_mask=(np.arange(length) > 1).astype(np.uint8),
            rollout_logprobs=np.full(length, -3.0, np.float32),
            versions=[(0, length)],
            reward=reward,
            temperature=0.7 if length % 2 else 1.0,
        )

    return [TrainingGroup(str(g), [sample(5 + 3 * g + i, float(i)) for i in range(3)]) for g in range(2)]


def step(model_dir: str, role: Any) -> dict[str, Any]:
    """Rows, loss and gradients of a bf16 model, as compute_gradient and forward_pass make them; where they are."""
    algorithm = AlgorithmConfig(use_rollout_logprobs=True, kl_loss_coef=0.1, entropy_coef=0.01)
    config = RunConfig(algorithm=algorithm, trainer=TrainerConfig(max_tokens_per_gpu=16, params_dtype="bfloat16"))
    start(config, 0, 1)
    objective = build_objective(config)
    part = objective.batch_of(groups(), 0)
    ones = np.ones(part.num_tokens, np.float32)
    part = part.with_columns(dict.fromkeys(("reference_logprobs", "values", "returns"), -ones))
    part = part.with_columns(objective.advantages(part))
    part = part.with_columns(objective.prepare(part))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = gpt.build_model(config, model_dir, role=role)
        model.module.train()
        model.config.finalize_model_grads_func = None
        rows = update.pack(part, np.arange(part.num_samples), 16, update.rank_layout(model))
        values = update.TokenValues(part.num_tokens)
        is_policy = role == "policy"
        loss = update.loss_of_row(part, 9, len(rows), objective, values) if is_policy else loss_of_values(part, 9, len(rows), 0.2)
        reports = update.run_schedule(model, rows, loss, forward_only=False)
        collected = update.run_schedule(model, rows, lambda row, *made: made[0], forward_only=True)
        gradients = [parameter.grad for parameter in model.module.parameters()]
        found = {
            "rows": len(rows),
            "on": sorted({str(t.device) for report in reports for t in report.values()} | {str(t.device) for t in collected}),
            "gradients_on": sorted({f"{gradient.device} {gradient.dtype}" for gradient in gradients}),
        }
    parallel.stop()
    return found


def losses() -> dict[str, list[str]]:
    """Of each algorithm and correction: the devices of its loss, its measures and the gradient of its logprobs, over packed rows."""
    found = {}
    mixed = mixed_batch()
    ones = np.ones(mixed.num_tokens, np.float32)
    wanted = ("old_logprobs", "current_logprobs", "advantages")
    batch = mixed.with_columns({name: -ones for name in wanted if name not in mixed})
    broker = BrokerConfig(required_fields=["values", "teacher_logprobs"])
    of_algorithms = {name: {"advantage_estimator": name} for name in plugin_names("algorithms")}
    settings = {"trm": {"trm_max": 1.0}}
    of_corrections = {name: {"corrections": [name], "settings": settings.get(name, {})} for name in plugin_names("corrections")}
    for name, given in {**of_algorithms, **of_corrections}.items():
        try:
            objective = build_objective(RunConfig(broker=broker, algorithm=AlgorithmConfig(**given, use_rollout_logprobs=False)))
        except ConfigError:  # made for the other way only
            objective = build_objective(RunConfig(broker=broker, algorithm=AlgorithmConfig(**given, use_rollout_logprobs=True)))
        part = batch.with_columns(objective.prepare(batch))
        with FakeTensorMode(allow_non_fake_inputs=True):
            columns, devices = DeviceColumns(part, DEVICE), set[torch.device]()
            for micro in pack(part, np.arange(part.num_samples), 64, RankLayout(device=DEVICE)):
                new = torch.full(micro.tokens.shape, -1.0, device=DEVICE, requires_grad=True)
                outcome = objective.loss(Row(micro, columns, new, -new, old=objective.old_column(part)))
                masked_sum(outcome.loss, micro.loss_mask).backward()
                devices |= {tensor.device for tensor in (outcome.loss, new.grad, *outcome.measures.values()) if tensor is not None}
            found[name] = sorted(map(str, devices))
    return found


class Gathered(Exception):
    """What a rank tells all others, of whom there are none here."""


def _gathered(mine: list[Any], form: object) -> NoReturn:
    raise Gathered(mine)


def ranks(model_dir: str, size: int = 64) -> dict[str, Any]:
    """What each rank holds, by Hugging Face name, and its bytes of parameters in bfloat16."""
    trainer = TrainerConfig(tensor_model_parallel_size=4, pipeline_model_parallel_size=2, sequence_parallel=True, params_dtype="bfloat16")
    options = {"expert_model_parallel_size": 4, "moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True}
    config = RunConfig(trainer=trainer, megatron=options)
    held, sizes = [], []
    for rank in range(size):
        start(config, rank, size)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = gpt.build_model(config, model_dir)
            hf_export.parallel = types.SimpleNamespace(gather=_gathered)
            hf_export.PART_BYTES = 1
            try:
                hf_export.HfExport(model)
            except Gathered as mine:
                held.append({tensor.name: tensor.shape for tensor in mine.args[0]})
            sizes.append(sum(parameter.numel() * parameter.element_size() for parameter in model.gpt.parameters()))
        parallel.stop()
    return {"held": held, "bytes": sizes}


def main() -> None:
    """See the head of this file."""
    kind, *folders = sys.argv[1:]
    if kind == "ranks":
        print(json.dumps(ranks(*folders)))
    else:
        steps = {
            f"{folder} {role}": step(folder, role) for folder, role in [(folders[0], "value"), *((folder, "policy") for folder in folders)]
        }
        print(json.dumps({"device": str(DEVICE), "steps": steps, "losses": losses()}))


if __name__ == "__main__":
    main()
