"""From the samples of groups to a batch: which columns it has, and what makes a sample unfit for it.

S samples   N tokens of all samples   T tokens of one sample
"""

import logging
from collections.abc import Collection, Sequence

import numpy as np

from slimebus.bus.errors import DataError
from slimebus.bus.messages import NO_VERSION, has_failed
from slimebus.bus.sample_table import oldest_version
from slimebus.bus.samples import Sample
from trainer.batches.batch import Batch, Column, Scope, TrainingGroup

log = logging.getLogger("trainer")

COLUMNS = ("tokens", "loss_mask", "rollout_logprobs", "versions", "lag", "reward", "temperature", "trajectory", "turn")
"""Those that every batch has."""
LARGEST_LOGPROB = 0.05
"""What a log_softmax in bfloat16 may round up to; a larger one is no logprob."""
LEAST_LOGPROB = -1e4
"""Ratios and KL terms of larger ones stay finite; the least that an engine reports at temperature 0.01 is some -1,000."""


def is_failed(sample: Sample) -> bool:
    """True for a sample that must not be trained; the broker counts it as failed too."""
    return has_failed(sample.status, sample.reward, oldest_version(sample.versions, sample.loss_mask))


def check_sample(
    sample: Sample, name: str, vocab_size: int, *, reads_logprobs: bool, fields: Collection[str] = (), row_fields: Collection[str] = ()
) -> None:
    """Raise DataError, with what was got and expected, for a sample of the bus that would spoil the model or end the trainer.

    Where loss_mask is 1 rollout_logprobs must be those of tokens that were sampled, if the loss reads them. It must have these fields:
    finite there, one entry a token or one in all; and row_fields, of any number of rows.
    """
    if len(sample.tokens) == 0:
        raise DataError(f"{name}: no tokens")
    outside = sample.tokens[(sample.tokens < 0) | (sample.tokens >= vocab_size)]
    if len(outside):
        raise DataError(
            f"{name}: token id {outside[0]} is outside the model's vocabulary of {vocab_size};"
            " the rollout's tokenizer and the trainer's model do not match"
        )
    is_trained = np.asarray(sample.loss_mask) > 0
    is_trained[0] = False
    if reads_logprobs:
        is_sound = (sample.rollout_logprobs >= LEAST_LOGPROB) & (sample.rollout_logprobs <= LARGEST_LOGPROB)
        wrong = np.flatnonzero(is_trained & ~is_sound)
        if len(wrong):
            value = sample.rollout_logprobs[wrong[0]]
            raise DataError(f"{name}: rollout_logprobs[{wrong[0]}] is {value} ({len(wrong)} such); expected {LEAST_LOGPROB:g} to 0")
    for field in (*fields, *row_fields):
        if field not in sample.extras:
            remedy = f"set broker.required_fields: [{field}], so that every group waits for it"
            raise DataError(f"{name}: no field {field!r}, which the algorithm reads; {remedy}")
    for field in fields:
        _check_values(sample.extras[field], field, name, is_trained)


def _check_values(values: np.ndarray, field: str, name: str, is_trained: np.ndarray) -> None:
    if values.size not in (1, len(is_trained)) or values.ndim > 1:
        raise DataError(f"{name}: field {field!r} has shape {list(values.shape)}; expected [{len(is_trained)}], [1] or []")
    with np.errstate(over="ignore"):  # a double may be too large for the loss, which is computed in float32
        is_finite = np.isfinite(values.astype(np.float32))
    wrong = np.flatnonzero(~is_finite & (is_trained if values.size == len(is_trained) else True))
    if len(wrong):
        raise DataError(f"{name}: {field}[{wrong[0]}] is {values.reshape(-1)[wrong[0]]} ({len(wrong)} such); expected finite numbers")


def advantage_problems(groups: Sequence[TrainingGroup]) -> dict[str, str]:
    """Why groups cannot be trained, by their ids: they lack the field `advantages`, which other samples of the batch bring."""
    numbers = {group.id: (sum("advantages" not in sample.extras for sample in group.samples), len(group.samples)) for group in groups}
    if all(missing == size for missing, size in numbers.values()):
        return {}
    why = "bring no field 'advantages', which others of the batch bring; give it to all, or to none for those of the algorithm"
    return {name: f"group {name}: {missing} of {size} samples {why}" for name, (missing, size) in numbers.items() if missing}


def flatten(
    groups: Sequence[TrainingGroup],
    *,
    version: int | None = None,
    is_supervised: bool = False,
    reserved: Collection[str] = (),
    needed: Collection[str] = (),
    row_fields: Collection[str] = (),
) -> Batch:
    """One batch of groups, at least one. version: the one being trained (None: the newest in the batch). Supervised: temperatures are 1.
    reserved: names that no field may have. needed, row_fields: those that check_sample was asked for.

    | column | scope | |
    |---|---|---|
    | tokens, loss_mask, rollout_logprobs | token | int32; f32, 0 at the first token of each sample, which has no context; f32 |
    | versions, lag | token | int64; the version that made it (-1: none), how many versions ago that is (0 where none made it) |
    | reward, temperature | sample | f64, 0 where there is none; f32, what the logits are divided by |
    | trajectory, turn | sample | int64, which of the group's attempts it is a part of; int64 |

    and every other field that all samples have, of the worker or put later: a needed one is of scope `token` (one entry of a sample is that
    of each of its tokens; any numbers do), one of row_fields `row`, and else sizes decide: `token` where it has T entries for each sample
    of the batch, `sample` where one, else `row`. Floats of several types get the widest of them. A field that only some samples have, or
    in other types, is left out and the log says why.
    """
    samples = [sample for group in groups for sample in group.samples]
    lengths = np.array([len(sample.tokens) for sample in samples], dtype=np.int64)
    ends = np.cumsum(lengths)
    loss_mask = np.concatenate([sample.loss_mask for sample in samples]).astype(np.float32)
    loss_mask[ends - lengths] = 0.0
    runs = np.array([run for sample in samples for run in sample.versions if run[1]], np.int64).reshape(-1, 2)
    versions = np.repeat(runs[:, 0], runs[:, 1])
    newest = int(versions.max(initial=0)) if version is None else version
    attempts = [i if sample.trajectory is None else sample.trajectory for group in groups for i, sample in enumerate(group.samples)]
    columns = {
        "tokens": Column(np.concatenate([sample.tokens for sample in samples]).astype(np.int32)),
        "loss_mask": Column(loss_mask),
        "rollout_logprobs": Column(np.concatenate([sample.rollout_logprobs for sample in samples]).astype(np.float32)),
        "versions": Column(versions),
        "lag": Column(np.where(versions == NO_VERSION, 0, newest - versions)),
        "reward": Column(np.array([sample.reward or 0.0 for sample in samples]), "sample"),
        "temperature": Column(np.array([1.0 if is_supervised else s.temperature for s in samples], np.float32), "sample"),
        "trajectory": Column(np.array(attempts, np.int64), "sample"),
        "turn": Column(np.array([sample.turn for sample in samples], np.int64), "sample"),
    }
    group_of = np.repeat(np.arange(len(groups)), [len(group.samples) for group in groups])
    for name in sorted({name for sample in samples for name in sample.extras}):
        scope: Scope | None = "token" if name in needed else "row" if name in row_fields else None
        is_taken = name in columns or name in reserved
        column = "the trainer has a column of its own of that name" if is_taken else _field_column(name, samples, lengths, scope)
        if isinstance(column, Column):
            columns[name] = column
        else:
            log.warning("field %r is left out of this batch: %s", name, column)
    return Batch(ends, group_of, columns)


def _field_column(name: str, samples: Sequence[Sample], lengths: np.ndarray, scope: Scope | None) -> Column | str:
    """The column of this field, or why there is none. scope: None where sizes decide."""
    arrays = [sample.extras[name] for sample in samples if name in sample.extras]
    if len(arrays) < len(samples):
        return f"{len(arrays)} of {len(samples)} samples have it"
    dtypes = {array.dtype for array in arrays}
    if len(dtypes) > 1 and (scope == "token" or all(dtype.kind == "f" for dtype in dtypes)):
        arrays = [array.astype(np.result_type(*dtypes)) for array in arrays]
    if scope == "token":
        arrays = [np.broadcast_to(array, (length,)) for array, length in zip(arrays, lengths, strict=True)]
    if len({(array.dtype, array.shape[1:]) for array in arrays}) > 1:
        return f"its entries differ: {sorted({f'{array.dtype.name} {list(array.shape[1:])}' for array in arrays})}"
    counts = np.array([len(array) if array.ndim else 1 for array in arrays], np.int64)
    joined = np.concatenate([np.atleast_1d(array) for array in arrays])
    if scope is None:
        is_by_token = all(array.ndim for array in arrays) and np.array_equal(counts, lengths)
        scope = "token" if is_by_token else "sample" if np.all(counts == 1) else "row"
    return Column(joined, scope, np.cumsum(counts) if scope == "row" else None)
