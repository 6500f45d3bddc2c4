"""The engine's error apart from staleness: stale samples under the very version that made them.

    weight store --(deltas taken back)--> version v in bfloat16 --> in the policy's place --> forward only --> the policy's weights again

What is left between these logprobs and the sampler's is the engine's numerics alone: both had the weights as published, rounded to
bfloat16. The ratio in the loss also holds the updates since v (drift) and, where the trainer's weights are float32, their rounding.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from slimebus.bus.messages import NO_VERSION
from slimebus.bus.samples import Sample
from slimebus.weights.tensors import Tensor, tensor_bytes
from trainer.batches.batch import TrainingGroup
from trainer.model import parallel
from trainer.model.gpt import Model
from trainer.model.hf_load import expert_names, load_parameter
from trainer.model.policy import Policy
from trainer.model.reference import Reference
from trainer.publish.publication import Publication

MAX_SAMPLES = 32
"""Recomputed at a time; on the quick start some 1,000 tokens, which leaves a standard error of a few percent of the mean."""


def engine_mismatch(policy: Policy, publication: Publication, groups: Sequence[TrainingGroup] | None, version: int) -> dict[str, float]:
    """Metrics `mismatch/NAME` (docs/algorithms.md) on rank 0; none where no sample of an older version is here that is still kept.

    Every rank calls it between two versions, rank 0 with the groups about to be trained. `version` is that of the weights, which are bit
    by bit the same afterwards.
    """
    publication.wait()
    samples = stale_samples(groups or (), publication.oldest_kept, version)
    made_by = parallel.broadcast_value(only_version_of(samples[0]) if samples else NO_VERSION, int)
    tensors = shared_tensors(policy.model, publication.kept_tensors(made_by)) if made_by != NO_VERSION else None
    if tensors is None:
        return {}
    chosen = [TrainingGroup("mismatch", samples)] if groups is not None else None
    with torch.no_grad(), Reference(policy.model).swapped_in():
        load_version(policy.model, tensors, made_by)
        then = np.concatenate(policy.logprobs(chosen))
    now = np.concatenate(policy.logprobs(chosen))
    return {f"mismatch/{name}": value for name, value in mismatch_metrics(samples, then, now, version - made_by).items()} if chosen else {}


def only_version_of(sample: Sample) -> int:
    """The one version that made all of a sample that was generated; NO_VERSION where there are several or none."""
    versions = {version for version, count in sample.versions if count and version != NO_VERSION}
    return versions.pop() if len(versions) == 1 else NO_VERSION


def stale_samples(groups: Sequence[TrainingGroup], oldest: int, version: int) -> list[Sample]:
    """At most MAX_SAMPLES of one version before `version` and not before `oldest`, the one with the most samples (the older of two)."""
    by_version: dict[int, list[Sample]] = {}
    for sample in (sample for group in groups for sample in group.samples):
        if oldest <= (made_by := only_version_of(sample)) < version and made_by != NO_VERSION and np.any(sample.loss_mask[1:]):
            by_version.setdefault(made_by, []).append(sample)
    found = max(by_version.items(), key=lambda item: (len(item[1]), -item[0]), default=(0, []))[1]
    return found[:: -(-len(found) // MAX_SAMPLES)] if found else []


def mismatch_metrics(samples: Sequence[Sample], then: np.ndarray, now: np.ndarray, lag: int) -> dict[str, float]:
    """Of logprobs under the samples' version and under the current one, [N] each."""
    mask = np.concatenate([np.r_[0, sample.loss_mask[1:]] for sample in samples]) > 0
    rollout = np.concatenate([sample.rollout_logprobs for sample in samples]).astype(np.float64)[mask]
    error, drift = then[mask] - rollout, now[mask] - then[mask]
    return {
        "lag": float(lag),
        "tokens": float(mask.sum()),
        "mean": float(np.abs(error).mean()),
        "max": float(np.abs(error).max()),
        "kl_k3": float((np.exp(error) - 1 - error).mean()),
        "drift_mean": float(np.abs(drift).mean()),
        "drift_kl_k3": float((np.exp(drift) - 1 - drift).mean()),
    }


@torch.no_grad()
def load_version(model: Model, tensors: Mapping[str, Tensor], version: int) -> None:
    """Give the model these weights, by Hugging Face name."""
    live = model.gpt.state_dict(keep_vars=True)
    for name, whole_name in expert_names(model.gpt).items():
        load_parameter(live[name].data, model.hf, whole_name, tensors, f"version {version}")


def shared_tensors(model: Model, mine: Mapping[str, Tensor] | None) -> dict[str, Tensor] | None:
    """Of the tensors that all ranks have, those that this rank's part of the model is made of; None where a rank's are gone (None)."""
    forms = None if mine is None else [(name, tensor.dtype, tensor.shape) for name, tensor in mine.items()]
    of_ranks = parallel.gather(forms, list[tuple[str, str, tuple[int, ...]]] | None)
    if any(theirs is None for theirs in of_ranks):
        return None
    wanted = {name for whole_name in expert_names(model.gpt).values() for name in model.hf.rule(whole_name).names}
    if len(of_ranks) == 1:
        return dict(mine or {})
    kept = {}
    for rank, theirs in enumerate(of_ranks):
        for name, dtype, shape in theirs or ():
            payload = mine[name].buffer if mine and rank == parallel.rank() else np.empty(tensor_bytes(name, dtype, shape), np.uint8)
            moved = torch.from_numpy(payload).to(parallel.device())
            dist.broadcast(moved, rank)
            if name in wanted:
                kept[name] = Tensor(dtype, shape, moved.cpu().numpy())
    return kept
