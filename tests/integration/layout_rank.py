"""One rank of test_parallel_layouts: three steps on random groups, then what rank 0 saw as JSON.

torchrun --nproc-per-node N layout_rank.py MODEL OUT.json '{"tensor_model_parallel_size": 2}'
"""

import hashlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from slimebus.config.schema import AlgorithmConfig, OptimizerConfig
from trainer import parallel
from trainer.batch import Group, Sample
from trainer.policy import Policy
from trainer.settings import ModelSettings, TrainerSettings


def groups(seed: int) -> list[Group]:
    draw = np.random.default_rng(seed)

    def sample(prompt: int, reward: float) -> Sample:
        length = prompt + int(draw.integers(1, 25))
        return Sample(
            tokens=draw.integers(0, 38, length).astype(np.int32),
            loss_mask=(np.arange(length) >= prompt).astype(np.uint8),
            rollout_logprobs=(-3.6 + 0.2 * draw.standard_normal(length)).astype(np.float32),
            reward=reward,
        )

    return [Group(f"g{g}", [sample(3 + g, r) for r in (0.0, 1.0, float(g % 2))]) for g in range(5)]


def digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    return {name: hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest() for name, tensor in tensors}


def main() -> None:
    model, out, layout = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    settings = TrainerSettings(
        model=ModelSettings(hf_checkpoint=model, **layout),
        optimizer=OptimizerConfig(lr=1e-3, lr_warmup_iters=2, clip_grad=1.0),
        algorithm=AlgorithmConfig(use_rollout_logprobs=False, use_tis=True, entropy_coef=0.01),
        max_tokens_per_gpu=48,
    )
    policy = Policy.build(settings)
    seen: dict[str, object] = {"exported": digest(policy.hf_tensors()), "owners": policy.owners()}
    owned = json.dumps(digest(policy.owned_tensors())).encode()
    seen["owned"] = [json.loads(of_rank) for of_rank in parallel.gather_bytes(owned, dist.group.WORLD)]
    batch = lambda step: groups(step) if policy.is_main else None  # noqa: E731
    seen["logprobs"] = [float(x.sum()) for x in policy.logprobs(batch(0))]
    seen["metrics"] = [policy.train(batch(step)) for step in range(3)]
    folder = str(out.with_suffix(".checkpoint"))
    policy.save_checkpoint(folder, 3, {"n": 1})
    after = policy.train(batch(3))
    assert policy.load_checkpoint(folder) == (3, {"n": 1})
    seen["after_save"], seen["after_load"] = after, policy.train(batch(3))
    policy.save_hf(str(out.with_suffix(".hf")))
    if policy.is_main:
        out.write_text(json.dumps(seen))
    policy.close()


if __name__ == "__main__":
    main()
