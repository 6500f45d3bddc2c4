"""What `bin/bench trainer` compares the trainer with: megatron-core's schedule and optimizer alone, in a process of its own.

bench_trainer_loop.py bare MODEL STEPS       {"step_s": of each step on the packed rows}
bench_trainer_loop.py packing MODEL ROUNDS   {"packed" | "padded" | "sorted": real tokens a CPU second; "rows" | "fewest": of 1,024}
bench_trainer_loop.py passes MODEL ROUNDS    {"with" | "without": seconds of a step with the forward pass for old_logprobs, and without}
"""

import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from bench_row import median_of
from bench_trainer import BUDGET, GROUPS, made_group

from slimebus.bus.samples import Sample
from slimebus.config import RunConfig
from slimebus.config.schema import AlgorithmConfig, OptimizerConfig, TrainerConfig
from trainer.compat import cpu_compat

cpu_compat.import_megatron()

import torch  # noqa: E402
from megatron.core import tensor_parallel  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402

from trainer.batches.batch import Batch, TrainingGroup  # noqa: E402
from trainer.batches.flatten import flatten  # noqa: E402
from trainer.batches.packing import MicroBatch, RankLayout, pack, pack_row, plan_rows  # noqa: E402
from trainer.model.policy import Policy  # noqa: E402

WARM = 2
"""Steps or rounds before the first that counts."""


def batch_of(samples: Sequence[Sample]) -> Batch:
    """These samples, all in one group."""
    return flatten([TrainingGroup("g", list(samples))])


def all_samples() -> list[Sample]:
    """Those of one step."""
    return [sample for index in range(GROUPS) for sample in made_group(index)]


def policy_of(folder: str, **algorithm: Any) -> Policy:
    """The trainer's model and optimizer, on one rank."""
    trainer = TrainerConfig(max_tokens_per_gpu=BUDGET)
    return Policy.build(RunConfig(trainer=trainer, optimizer=OptimizerConfig(lr=1e-5), algorithm=AlgorithmConfig(**algorithm)), folder)


def bare_step(policy: Policy, rows: Sequence[MicroBatch]) -> None:
    """One step of Megatron's: zero the gradients, forward and backward of all rows with its own cross entropy, the optimizer."""
    module, tokens = policy.model.module, sum(float(row.loss_mask.sum()) for row in rows)

    def forward(iterator: Any, model: Any) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
        row = next(iterator)
        logits = model(row.tokens, row.positions, None, packed_seq_params=row.packed) @ policy.model.head.T

        def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            losses = tensor_parallel.vocab_parallel_cross_entropy(output.float().clone(), row.targets)  # it writes there
            return (losses * row.loss_mask).sum() / tokens * len(rows), {}

        return logits, loss

    module.train()
    module.zero_grad_buffer()
    with cpu_compat.library_warnings_ignored():
        policy.optimizer.zero_grad()
    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(rows),
        model=module,
        num_microbatches=len(rows),
        seq_length=rows[0].tokens.shape[1],
        micro_batch_size=1,
        forward_only=False,
    )
    policy.optimizer.step()


def seconds(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """That it takes; by process_time those of its thread, whatever else the machine does."""
    started = clock()
    work()
    return clock() - started


def bare(policy: Policy, steps: int) -> dict[str, Any]:
    """Steps on the rows that the trainer makes of the same samples, packed before."""
    samples = all_samples()
    rows = pack(batch_of(samples), np.arange(len(samples)), BUDGET, RankLayout())
    return {"step_s": [seconds(lambda: bare_step(policy, rows)) for _ in range(WARM + steps)][WARM:]}


def padded_row(samples: Sequence[Sample]) -> MicroBatch:
    """Samples padded to the longest of them. As a row of equally long sequences it is computed as a padded batch is, without a copy."""
    width = max(len(sample.tokens) for sample in samples)

    def padded(sample: Sample) -> Sample:
        more = width - len(sample.tokens)
        arrays = {name: np.pad(getattr(sample, name), (0, more)) for name in ("tokens", "loss_mask", "rollout_logprobs")}
        return Sample(versions=[(-1, width)], reward=sample.reward, **arrays)

    return pack_row(batch_of([padded(sample) for sample in samples]), np.arange(len(samples)), RankLayout())


def packing(policy: Policy, rounds: int) -> dict[str, float]:
    """The same samples packed, padded in one batch, and sorted by length and padded by four, in turn."""
    samples = all_samples()
    ordered = sorted(samples, key=lambda sample: len(sample.tokens))
    rows = {
        "packed": pack(batch_of(samples), np.arange(len(samples)), BUDGET, RankLayout()),
        "padded": [padded_row(samples)],
        "sorted": [padded_row(ordered[i : i + 4]) for i in range(0, len(ordered), 4)],
    }
    steps = {name: functools.partial(bare_step, policy, made) for name, made in rows.items()}
    taken = median_of(rounds, {name: functools.partial(seconds, step, time.process_time) for name, step in steps.items()})
    real = sum(len(sample.tokens) for sample in samples)
    return {name: real / step_s for name, step_s in taken.items()} | row_counts()


def row_counts() -> dict[str, float]:
    """Rows of 1,024 long-tailed lengths over 16 data-parallel ranks, and how many first-fit decreasing has, rounded up to the ranks."""
    lengths = np.minimum(32768, np.random.default_rng(0).lognormal(np.log(32768 / 6), 0.9, 1024) + 200).astype(np.int64)
    rooms = list[int]()
    for length in sorted(lengths.tolist(), reverse=True):
        at = next((i for i, room in enumerate(rooms) if room >= length), None)
        if at is None:
            rooms.append(32768 - length)
        else:
            rooms[at] -= length
    return {"rows": sum(len(rank) for rank in plan_rows(lengths, 16, 32768)), "fewest": -(-len(rooms) // 16) * 16}


def passes(policy: Policy, rounds: int) -> dict[str, float]:
    """A training step with one optimizer step, and the same behind a forward pass for old_logprobs, in turn."""
    groups = [TrainingGroup(str(index), made_group(index)) for index in range(GROUPS)]
    return median_of(
        rounds,
        {
            "without": lambda: seconds(lambda: policy.train(groups)),
            "with": lambda: seconds(lambda: (policy.logprobs(groups), policy.train(groups))),
        },
    )


def main() -> None:
    """See the head of this file."""
    kind, folder, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    policy = policy_of(folder, use_rollout_logprobs=False) if kind == "passes" else policy_of(folder)
    print(json.dumps({"bare": bare, "packing": packing, "passes": passes}[kind](policy, count)))


if __name__ == "__main__":
    main()
