"""The engine's error under the version that made a sample: apart from drift, and without a trace in the weights."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from made_samples import made
from msgspec.structs import replace

from slimebus.bus.messages import NO_VERSION
from slimebus.bus.samples import Sample
from slimebus.config.schema import AlgorithmConfig, OptimizerConfig
from slimebus.weights.messages import VersionGone
from slimebus.weights.store.version_store import VersionStore
from trainer.batches.batch import TrainingGroup
from trainer.mismatch import MAX_SAMPLES, engine_mismatch, load_version, stale_samples
from trainer.model.optimizer import GradientCosine
from trainer.model.reference import Reference
from trainer.publish.rank_part import HostSnapshot


def sample_of(version: int, *more: tuple[int, int]) -> Sample:
    return made((NO_VERSION, 2), (version, 2), *more)


def test_samples_of_one_stale_version_that_is_kept_are_taken() -> None:
    groups = [TrainingGroup("a", [sample_of(3), sample_of(3), sample_of(5), sample_of(1), sample_of(1), sample_of(1)])]
    assert [s.versions[1][0] for s in stale_samples(groups, 2, 5)] == [3, 3]
    assert stale_samples(groups, 4, 5) == []
    assert stale_samples([TrainingGroup("b", [sample_of(3, (4, 2))])], 0, 5) == [], "two versions made it"
    assert 1 <= len(stale_samples([TrainingGroup("c", [sample_of(3)] * 100)], 0, 5)) <= MAX_SAMPLES


class Publication:
    """A trainer's store without its server."""

    def __init__(self) -> None:
        self.store, self.snapshot, self.oldest_kept = VersionStore(keep=4, lineage="L"), HostSnapshot(), 0

    def publish(self, policy: Any) -> None:
        self.store.publish(self.snapshot.copy_to_host(policy.export.owned_tensors()))

    def wait(self) -> None: ...

    def kept_tensors(self, version: int) -> Any:
        try:
            return self.store.restore(version)
        except VersionGone:
            return None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_perfect_engine_has_no_mismatch_at_any_lag_and_the_weights_stay(
    dtype: str, build_policy: Callable[..., Any], make_batch: Callable[..., list[TrainingGroup]], tied_model: Any
) -> None:
    policy = build_policy(tied_model, optimizer=OptimizerConfig(lr=1e-3), algorithm=AlgorithmConfig(), dtype=dtype)
    publication = Publication()
    publication.publish(policy)
    policy.train(make_batch(1))
    publication.publish(policy)
    rounded = build_rounded(policy, publication.store.restore(0))
    groups = [
        TrainingGroup(g.id, [replace(s, rollout_logprobs=logprobs, versions=[(0, len(s.tokens))]) for s, logprobs in of_group])
        for g, of_group in zip(make_batch(), rounded(make_batch()), strict=True)
    ]
    before = {name: tensor.clone() for name, tensor in policy.model.gpt.state_dict().items() if isinstance(tensor, torch.Tensor)}
    got = engine_mismatch(policy, publication, groups, 1)  # type: ignore[arg-type]
    assert got["mismatch/lag"] == 1
    assert got["mismatch/max"] < 1e-5
    assert got["mismatch/drift_mean"] > 1e-3
    assert got["mismatch/tokens"] > 50
    after = policy.model.gpt.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert engine_mismatch(policy, publication, groups, 0) == {}  # type: ignore[arg-type]
    for _ in range(5):
        publication.publish(policy)
    assert engine_mismatch(policy, publication, groups, 6) == {}, "version 0 is no longer kept"  # type: ignore[arg-type]


def build_rounded(policy: Any, tensors: Any) -> Callable[[list[TrainingGroup]], list[Any]]:
    """logprobs of groups under published tensors, as an engine without numerical errors reports them."""

    def of(groups: list[TrainingGroup]) -> list[Any]:
        with Reference(policy.model).swapped_in():
            load_version(policy.model, tensors, 0)
            found = iter(policy.logprobs(groups))
        return [[(sample, next(found)) for sample in group.samples] for group in groups]

    return of


def test_the_cosine_of_consecutive_gradients_is_that_of_the_flat_ones(
    build_policy: Callable[..., Any], make_batch: Callable[..., list[TrainingGroup]], tied_model: Any
) -> None:
    seen = []

    class Seen(GradientCosine):
        def measure(self, optimizer: Any, norm: float) -> None:
            chain = getattr(optimizer, "chained_optimizers", [optimizer])
            seen.append(np.concatenate([g.numpy().reshape(-1).copy() for part in chain for g in part.get_main_grads_for_grad_norm()]))
            super().measure(optimizer, norm)

    policy = build_policy(tied_model, optimizer=OptimizerConfig(lr=1e-3, clip_grad=0.01))
    policy.cosine = Seen()
    assert "grad_cosine" not in policy.train(make_batch(0))
    got = policy.train(make_batch(1))["grad_cosine"]
    a, b = seen
    assert got == pytest.approx(float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)), rel=1e-4)
