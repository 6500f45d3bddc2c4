"""One step of training, watched: profiled, dumped when it goes wrong, its speed measured. No collective of its own between steps."""

import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from slimebus.bus.errors import SlimebusError
from slimebus.config import Resolved
from trainer.checkpoint import trained_state
from trainer.checkpoint.trained_state import random_state
from trainer.model import parallel
from trainer.model.policy import Policy
from trainer.session.step_batch import StepBatch, StepPlan
from trainer.watch.dumps import Dumps, SampleDump

log = logging.getLogger("trainer")

MAX_MEMORY_EVENTS = 100_000


class StepProfile:
    """Traces steps `first` to `last` of a run; every rank has one. What it writes can be opened in ui.perfetto.dev, and memory snapshots
    at pytorch.org/memory_viz.
    """

    def __init__(self, folder: Path, steps: range, rank: int) -> None:
        self.folder, self.steps, self.rank = folder, steps, rank
        self._profiler: Any = None

    def before(self, step: int) -> None:
        """Begin at the first step."""
        if step != self.steps.start:
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=MAX_MEMORY_EVENTS)
        self._profiler = torch.profiler.profile(activities=activities, record_shapes=True)
        self._profiler.start()

    def after(self, step: int) -> None:
        """Write at the last step."""
        if self._profiler is None or step + 1 < self.steps.stop:
            return
        self._profiler.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        trace = self.folder / f"trace-rank{self.rank}.json.gz"
        self._profiler.export_chrome_trace(str(trace))
        self._profiler = None
        if torch.cuda.is_available():
            torch.cuda.memory._dump_snapshot(str(self.folder / f"memory-rank{self.rank}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        log.info("profile of steps %d to %d written to %s", self.steps.start, self.steps.stop - 1, trace)


PEAK_FLOPS = {
    **{"B200": 2250e12, "H200": 989e12, "H800": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "GH200": 989e12, "H20": 148e12},
    **{"A100": 312e12, "A800": 312e12, "L40S": 362e12, "L40": 181e12, "A10": 125e12, "4090": 165e12},
}
"""Dense bfloat16, of NVIDIA's data sheets, by a part of the device's name; the longest part that fits counts."""


def peak_flops(name: str) -> float | None:
    """Of one device in bfloat16; None where it is not known."""
    fits = [part for part in PEAK_FLOPS if part in name]
    return PEAK_FLOPS[max(fits, key=len)] if fits else None


def used_parameters(shapes: Mapping[str, tuple[int, ...]], *, is_tied: bool, share_of_experts: float) -> float:
    """Parameters that a token is multiplied with: no input embedding, unless the output uses it; of experts those that it is sent to."""
    used = 0.0
    for key, shape in shapes.items():
        if key == "embedding.word_embeddings.weight" and not is_tied:
            continue
        used += math.prod(shape) * (share_of_experts if ".experts." in key else 1.0)
    return used


def step_flops(lengths: list[int], parameters: float, attention_width: int) -> float:
    """Of forward and backward over sequences of these lengths: for each token 6 N + 12 L H Q T (PaLM, arXiv:2204.02311, appendix B).

    parameters: N; attention_width: L H Q, layers x heads x head size. Recomputation and passes that only compute logprobs do not count.
    """
    return 6.0 * parameters * sum(lengths) + 12.0 * attention_width * sum(length * length for length in lengths)


class Speed:
    """Metrics of speed, on rank 0. Every rank makes one."""

    def __init__(self, policy: Policy) -> None:
        config, self.num_passes = policy.model.config, policy.config.rollout.num_passes_per_rollout
        mine = {local.key: local.whole for local in trained_state.weights(policy)}
        shapes = {key: shape for of_rank in parallel.gather(mine, dict[str, tuple[int, ...]]) for key, shape in of_rank.items()}
        share = (config.moe_router_topk / config.num_moe_experts) if config.num_moe_experts else 1.0
        is_tied = policy.model.gpt.share_embeddings_and_output_weights
        self.parameters = used_parameters(shapes, is_tied=is_tied, share_of_experts=share)
        self.attention_width = config.num_layers * config.num_attention_heads * config.kv_channels
        is_bf16 = config.params_dtype is torch.bfloat16
        one = peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() and is_bf16 else None
        self.peak = None if one is None else one * torch.distributed.get_world_size()

    def of(self, batch: StepBatch, train_s: float) -> dict[str, float]:
        """Of the groups that had a gradient, in each pass. tokens_per_s: their tokens by the time of the step; mfu: of forward and backward
        over them."""
        lengths = [len(sample.tokens) for group in batch.groups if group.has_gradient for sample in group.samples] * self.num_passes
        metrics = {"tokens_per_s": sum(lengths) / max(train_s, 1e-9)}
        if self.peak is not None:
            metrics["mfu"] = step_flops(lengths, self.parameters, self.attention_width) / (max(train_s, 1e-9) * self.peak)
        return metrics


class StepWatch:
    """Every rank makes one. profile: steps that are traced. is_dumping: off in a replay, which has its batches on disk already."""

    def __init__(self, resolved: Resolved, file: Path | None, policy: Policy, *, profile: range | None, is_dumping: bool = True) -> None:
        self.policy, rank = policy, parallel.rank()
        self.dumps = Dumps(resolved, file, rank) if is_dumping else None
        limit = resolved.config.trainer.dump_samples if is_dumping and rank == 0 else 0
        self.samples = SampleDump(resolved.run_dir, limit) if limit else None
        self.profile = StepProfile(resolved.run_dir / "profile", profile, rank) if profile else None
        self.speed = Speed(policy)

    def train(self, step: int, batch: StepBatch | None, plan: StepPlan, *, version: int) -> dict[str, float]:
        """policy.train on rank 0's batch, and its metrics."""
        random, started = random_state(), time.perf_counter()
        if self.profile:
            self.profile.before(step)
        try:
            groups = batch.groups if batch else None
            metrics = self.policy.train(groups, num_steps=plan.num_steps, version=version, learning_rates=plan.learning_rates)
        except SlimebusError as bad:
            if bad.code == "nonfinite" and self.dumps:
                self.dumps.write("nonfinite", step, batch, {}, random)
            raise
        if self.profile:
            self.profile.after(step)
        if self.dumps and (reason := self.dumps.reason(metrics)):
            self.dumps.write(reason, step, batch, metrics, random)
        if self.samples and batch:
            self.samples.add(batch)
        return metrics | (self.speed.of(batch, time.perf_counter() - started) if batch else {})
