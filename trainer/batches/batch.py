"""What a step trains on: named columns over the tokens, samples and groups of a batch, the same on every rank.

S samples   N tokens of all samples, one sample after the other   G groups   T tokens of one sample
Entry t of a token column belongs to tokens[t]: rollout_logprobs[t] is log p(tokens[t] | tokens[:t]), loss_mask[t] = 1 where it is trained.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

import msgspec
import numpy as np
from safetensors.numpy import load, save

from slimebus.bus.errors import DataError
from slimebus.bus.samples import Sample

Scope = Literal["token", "sample", "group", "row"]
"""What the first axis of a column counts: N, S, G, or rows, of each sample its own number."""


class TrainingGroup(msgspec.Struct):
    """The samples of one attempt at a prompt that are trained; id names it in errors. has_gradient: set when it is trained."""

    id: str
    samples: list[Sample]
    has_gradient: bool = True


def read_only(values: np.ndarray) -> np.ndarray:
    """A view of them that cannot be written."""
    view = np.asarray(values).view()
    view.setflags(write=False)
    return view


@dataclass(frozen=True, slots=True)
class Column:
    """One array of a batch, read-only: a change would be seen by some ranks and not by others. row_ends: [S] int64, of scope `row` where
    each sample's rows end.
    """

    values: np.ndarray
    scope: Scope = "token"
    row_ends: np.ndarray | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", read_only(self.values))

    def select(self, samples: np.ndarray, tokens: np.ndarray, groups: np.ndarray) -> "Column":
        """The entries of these samples (indices), with these tokens and groups."""
        if self.row_ends is not None:
            counts = np.diff(self.row_ends, prepend=0)[samples]
            return Column(self.values[spans(self.row_ends[samples] - counts, counts)], "row", np.cumsum(counts))
        return Column(self.values[{"token": tokens, "sample": samples, "group": groups}[self.scope]], self.scope)


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples, each sample's tokens after those of the one before, and the columns that are known of them. It is never changed in place.

    ends: [S] int64, where each sample ends in the token columns. group_of: [S] int64, rising, index of each sample's group.
    """

    ends: np.ndarray
    group_of: np.ndarray
    columns: Mapping[str, Column]

    def __post_init__(self) -> None:
        for name in ("ends", "group_of"):
            object.__setattr__(self, name, read_only(getattr(self, name)))

    def __getitem__(self, name: str) -> np.ndarray:
        """The array of a column, in its own scope. Raises DataError with the columns there are."""
        return self.column(name).values

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def column(self, name: str) -> Column:
        """The column of this name. Raises DataError with the columns there are."""
        if name not in self.columns:
            raise DataError(f"the batch has no column {name!r}; it has {', '.join(sorted(self.columns))}")
        return self.columns[name]

    def per_token(self, name: str) -> np.ndarray:
        """A column spread over the tokens, [N, ...]: what a sample or group has, each of its tokens has."""
        column = self.column(name)
        if column.scope == "row":
            raise DataError(f"column {name!r} has rows of its own, so it cannot be spread over tokens")
        values = column.values[self.group_of] if column.scope == "group" else column.values
        return values if column.scope == "token" else self.to_tokens(values)

    def with_columns(self, columns: Mapping[str, Column | np.ndarray]) -> "Batch":
        """A batch that also has these; a bare array is a column of the tokens. Raises DataError for one of the wrong length."""
        sizes = {"token": self.num_tokens, "sample": self.num_samples, "group": self.num_groups}
        added = {name: column if isinstance(column, Column) else Column(np.asarray(column)) for name, column in columns.items()}
        for name, column in added.items():
            if len(column.values) != sizes.get(column.scope, len(column.values)):
                what = f"{len(column.values)} entries for the {sizes[column.scope]} {column.scope}s of the batch"
                raise DataError(f"column {name!r} has {what}")
        return replace(self, columns={**self.columns, **added})

    def select(self, samples: np.ndarray) -> "Batch":
        """The batch of these samples (rising indices), with all columns; groups without one of them are left out."""
        if len(samples) == self.num_samples:
            return self
        lengths = self.lengths[samples]
        tokens, (groups, group_of) = spans(self.starts[samples], lengths), np.unique(self.group_of[samples], return_inverse=True)
        columns = {name: column.select(samples, tokens, groups) for name, column in self.columns.items()}
        return Batch(np.cumsum(lengths), group_of, columns)

    def cut_groups(self, parts: int) -> list[np.ndarray]:
        """Its samples (indices) in so many parts of almost equal numbers of groups."""
        return np.split(
            np.arange(self.num_samples), np.searchsorted(self.group_of, [self.num_groups * i // parts for i in range(1, parts)])
        )

    @property
    def has_signal(self) -> np.ndarray:
        """Which groups have a trained token with an advantage other than 0, [G] bool."""
        return np.bincount(self.group_of, weights=self.sample_sums(self["advantages"] != 0)) > 0

    def to_tokens(self, values: np.ndarray) -> np.ndarray:
        """[N, ...] from [S, ...]: each of a sample's tokens gets what the sample has."""
        return np.repeat(values, self.lengths, axis=0)

    def sample_sums(self, values: np.ndarray) -> np.ndarray:
        """[S] from [N]: the sum over each sample's trained tokens; a masked token counts nothing even where it is not finite."""
        return np.add.reduceat(np.where(self["loss_mask"] > 0, values, 0.0).astype(np.float64), self.starts)

    def trajectory_sums(self, values: np.ndarray) -> np.ndarray:
        """[S] from [S]: for each sample the sum over all samples of its trajectory."""
        return np.bincount(self.trajectories, weights=values)[self.trajectories]

    @property
    def trajectories(self) -> np.ndarray:
        """[S] int64, which trajectory of the batch each sample is a part of, from 0 without gaps."""
        pairs = np.stack([self.group_of, self["trajectory"]])
        return np.unique(pairs, axis=1, return_inverse=True)[1].reshape(-1)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sample, [S]."""
        return np.diff(self.ends, prepend=0)

    @property
    def starts(self) -> np.ndarray:
        """Where each sample starts in the token columns, [S]."""
        return self.ends - self.lengths

    @property
    def num_tokens(self) -> int:
        """N."""
        return int(self.ends[-1]) if len(self.ends) else 0

    @property
    def num_samples(self) -> int:
        """S."""
        return len(self.ends)

    @property
    def num_groups(self) -> int:
        """G."""
        return int(self.group_of[-1]) + 1 if len(self.group_of) else 0


def spans(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Indices of spans that start here and are so long, one span after the other."""
    first = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) + np.repeat(starts - first, lengths)


def columns_to_bytes(columns: Mapping[str, Column]) -> bytes:
    """Columns as the raw buffers of safetensors."""
    arrays = {f"{column.scope}/{name}": np.ascontiguousarray(column.values) for name, column in columns.items()}
    return save(arrays | {f"row_ends/{name}": column.row_ends for name, column in columns.items() if column.row_ends is not None})


def columns_of_bytes(payload: bytes) -> dict[str, Column]:
    """What columns_to_bytes was given."""
    arrays = {tuple(key.split("/", 1)): values for key, values in load(payload).items()}
    return {
        name: Column(values, scope, arrays.get(("row_ends", name)))  # type: ignore[arg-type]
        for (scope, name), values in arrays.items()
        if scope in get_args(Scope)
    }


def batch_to_bytes(batch: Batch) -> bytes:
    """A batch as the raw buffers of safetensors."""
    return columns_to_bytes({**batch.columns, ".ends": Column(batch.ends), ".group_of": Column(batch.group_of)})


def batch_of_bytes(payload: bytes) -> Batch:
    """What batch_to_bytes was given."""
    columns = columns_of_bytes(payload)
    return Batch(columns.pop(".ends").values, columns.pop(".group_of").values, columns)
