"""What a step trains on: groups of samples as they come from the broker, and the same as flat arrays that cross ranks.

S samples   N tokens of all samples, one sample after the other   T tokens of one sample
Entry t of every array belongs to tokens[t]: rollout_logprobs[t] is log p(tokens[t] | tokens[:t]), loss_mask[t] = 1 where it is trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from slimebus.config.schema import AlgorithmConfig
from slimebus.errors import DataError
from trainer.algorithms import ADVANTAGES


@dataclass(frozen=True, slots=True)
class Sample:
    """One trainable token sequence."""

    tokens: np.ndarray
    """[T] int32, prompt and completion."""
    loss_mask: np.ndarray
    """[T] uint8; entry 0 has no context and is never trained."""
    rollout_logprobs: np.ndarray | None = None
    """[T] f32, the sampler's own; None for samples that were not sampled (SFT)."""
    reward: float = 0.0
    """What the advantage is computed from."""
    advantages: np.ndarray | float | None = None
    """Precomputed, per sample or per token [T]; None computes them from the group's rewards."""


@dataclass(frozen=True, slots=True)
class Group:
    """All samples of one attempt at a prompt."""

    id: str
    """Names the group in errors."""
    samples: Sequence[Sample]


Batch = Sequence[Group]


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """A batch as flat arrays, each sample's tokens after those of the one before."""

    tokens: np.ndarray
    """[N] int32."""
    loss_mask: np.ndarray
    """[N] f32, 0 or 1; 0 at the first token of every sample."""
    advantages: np.ndarray
    """[N] f32."""
    rollout_logprobs: np.ndarray
    """[N] f32, 0 where there are none."""
    ends: np.ndarray
    """[S] int64, where each sample ends in the flat arrays."""
    group_of: np.ndarray
    """[S] int64, index of each sample's group."""
    old_logprobs: np.ndarray
    """[N] f32; the rollout's until a forward pass recomputes them."""
    reference_logprobs: np.ndarray
    """[N] f32; 0 until a forward pass of the reference model fills them."""

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sample, [S]."""
        return np.diff(self.ends, prepend=0)

    @property
    def starts(self) -> np.ndarray:
        """Where each sample starts in the flat arrays, [S]."""
        return self.ends - self.lengths

    def split(self, flat: np.ndarray) -> list[np.ndarray]:
        """A flat [N] array as one [T] array a sample."""
        return np.split(flat, self.ends[:-1])

    def with_old_logprobs(self, logprobs: np.ndarray) -> "TokenBatch":
        """The same batch with recomputed old_logprobs [N]."""
        return replace(self, old_logprobs=logprobs)

    def with_reference_logprobs(self, logprobs: np.ndarray) -> "TokenBatch":
        """The same batch with reference_logprobs [N] of the frozen model."""
        return replace(self, reference_logprobs=logprobs)


def check_sample(sample: Sample, name: str, vocab_size: int) -> None:
    """Raise DataError unless the arrays agree in length and the tokens are in the vocabulary."""
    length = len(sample.tokens)
    arrays = {"loss_mask": sample.loss_mask, "rollout_logprobs": sample.rollout_logprobs, "advantages": sample.advantages}
    for field, array in arrays.items():
        if array is not None and np.ndim(array) == 1 and len(np.asarray(array)) != length:
            raise DataError(f"{name}: {field} has {len(np.asarray(array))} entries for {length} tokens; all arrays have one length")
    if length == 0:
        raise DataError(f"{name}: no tokens")
    low, high = int(np.min(sample.tokens)), int(np.max(sample.tokens))
    if low < 0 or high >= vocab_size:
        raise DataError(
            f"{name}: token id {high if high >= vocab_size else low} is outside the model's vocabulary of {vocab_size};"
            " the rollout's tokenizer and the trainer's model do not match"
        )


def flatten(batch: Batch, advantages: Sequence[np.ndarray], vocab_size: int) -> TokenBatch:
    """One TokenBatch from groups and each group's advantages [its samples]. Raises DataError for a malformed sample."""
    samples = [sample for group in batch for sample in group.samples]
    if not samples:
        raise DataError("a batch without samples; expected at least one")
    for group in batch:
        for index, sample in enumerate(group.samples):
            check_sample(sample, f"group {group.id} sample {index}", vocab_size)
    lengths = np.array([len(sample.tokens) for sample in samples], dtype=np.int64)
    ends = np.cumsum(lengths)
    loss_mask = np.concatenate([sample.loss_mask for sample in samples]).astype(np.float32)
    loss_mask[ends - lengths] = 0.0
    per_sample = [value for values in advantages for value in values]
    rollout = np.concatenate([np.zeros(len(s.tokens), np.float32) if s.rollout_logprobs is None else s.rollout_logprobs for s in samples])
    rollout = rollout.astype(np.float32)
    return TokenBatch(
        tokens=np.concatenate([sample.tokens for sample in samples]).astype(np.int32),
        loss_mask=loss_mask,
        advantages=np.concatenate([token_advantages(s, a) for s, a in zip(samples, per_sample, strict=True)]),
        rollout_logprobs=rollout,
        ends=ends,
        group_of=np.repeat(np.arange(len(batch), dtype=np.int64), [len(group.samples) for group in batch]),
        old_logprobs=rollout,
        reference_logprobs=np.zeros_like(rollout),
    )


def token_advantages(sample: Sample, computed: float) -> np.ndarray:
    """The sample's own advantages where it brings them, else the computed one, per token [T] f32."""
    value = computed if sample.advantages is None else sample.advantages
    return np.broadcast_to(np.asarray(value, dtype=np.float32), len(sample.tokens))


def share(batch: TokenBatch | None) -> TokenBatch:
    """Rank 0's batch on every rank; the others give None."""
    import torch.distributed as dist

    from trainer.parallel import broadcast_bytes

    if dist.get_world_size() == 1 and batch is not None:
        return batch
    arrays = {} if batch is None else {field.name: getattr(batch, field.name) for field in fields(batch)}
    return TokenBatch(
        **{
            field.name: np.frombuffer(broadcast_bytes(arrays[field.name].tobytes() if arrays else None), dtype=dtype_of(field.name)).copy()
            for field in fields(TokenBatch)
        }
    )


def dtype_of(field: str) -> type[np.generic]:
    """Element type of a TokenBatch array."""
    kinds: dict[str, type[np.generic]] = {"tokens": np.int32, "ends": np.int64, "group_of": np.int64}
    return kinds.get(field, np.float32)


def prepare(
    batch: Batch, algorithm: AlgorithmConfig, vocab_size: int, reference_logprobs: Sequence[np.ndarray] | None = None
) -> TokenBatch:
    """A TokenBatch with advantages, and reference_logprobs [T] per sample where given. Raises DataError for a malformed batch."""
    estimate = ADVANTAGES[algorithm.advantage_estimator]
    rewards = [np.array([sample.reward for sample in group.samples]) for group in batch]
    advantages = [estimate(values, std_normalization=algorithm.grpo_std_normalization) for values in rewards]
    tokens = flatten(batch, advantages, vocab_size)
    if reference_logprobs is not None:
        return replace(tokens, reference_logprobs=np.concatenate(reference_logprobs).astype(np.float32))
    return tokens
