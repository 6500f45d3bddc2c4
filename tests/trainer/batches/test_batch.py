"""Columns from the wire to the loss: their scopes, what is left out, what is refused, and the same bytes on every rank."""

import logging
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from slimebus.bus.errors import DataError
from slimebus.bus.messages import NO_VERSION
from slimebus.bus.samples import Sample
from slimebus.config import RunConfig
from slimebus.config.schema import AlgorithmConfig, BrokerConfig
from trainer.algorithms.grpo import Grpo
from trainer.batches.batch import Batch, Column, TrainingGroup, batch_of_bytes, batch_to_bytes
from trainer.batches.flatten import COLUMNS, advantage_problems, check_sample, flatten
from trainer.objective.build_objective import build_objective
from trainer.objective.group_rewards import rewards_with_kl
from trainer.objective.objective import Objective


def sample(length: int, **given: Any) -> Sample:
    arrays = {"tokens": np.arange(length, dtype=np.int32), "loss_mask": np.ones(length, np.uint8)}
    fixed = arrays | {"rollout_logprobs": np.full(length, -1.0, np.float32), "versions": [(NO_VERSION, 1), (5, length - 1)]}
    return Sample(**(fixed | {"reward": 1.0} | given))


def fields(length: int) -> dict[str, np.ndarray]:
    """One of each scope; two experts a token, and one picture of as many rows as tokens and one more."""
    return {
        "routed": np.arange(2 * length, dtype=np.int16).reshape(length, 2),
        "value": np.array(0.5),
        "score": np.array([length], np.float32),
        "pixels": np.full((length + 1, 3), length, np.uint8),
    }


def batch() -> Batch:
    groups = [[3, 2], [4]]
    return flatten([TrainingGroup(str(i), [sample(n, extras=fields(n)) for n in lengths]) for i, lengths in enumerate(groups)], version=7)


def test_every_field_of_a_sample_is_a_column_of_its_scope_and_type() -> None:
    made = batch()
    assert {name: (column.scope, column.values.dtype.name, column.values.shape) for name, column in made.columns.items()} == {
        "tokens": ("token", "int32", (9,)),
        "loss_mask": ("token", "float32", (9,)),
        "rollout_logprobs": ("token", "float32", (9,)),
        "versions": ("token", "int64", (9,)),
        "lag": ("token", "int64", (9,)),
        "reward": ("sample", "float64", (3,)),
        "temperature": ("sample", "float32", (3,)),
        "trajectory": ("sample", "int64", (3,)),
        "turn": ("sample", "int64", (3,)),
        "routed": ("token", "int16", (9, 2)),
        "value": ("sample", "float64", (3,)),
        "score": ("sample", "float32", (3,)),
        "pixels": ("row", "uint8", (12, 3)),
    }
    assert made["lag"].tolist() == [0, 2, 2, 0, 2, 0, 2, 2, 2]
    assert made.per_token("score").tolist() == [3, 3, 3, 2, 2, 4, 4, 4, 4]
    assert set(COLUMNS) <= made.columns.keys()
    with pytest.raises(DataError, match="'pixels' has rows of its own"):
        made.per_token("pixels")
    with pytest.raises(DataError, match=r"no column 'valeu'; it has .*, value"):
        made["valeu"]


def test_a_batch_is_the_same_on_every_rank() -> None:
    made = batch().with_columns({"of_groups": Column(np.array([1.0, 2.0]), "group")})
    again = batch_of_bytes(batch_to_bytes(made))
    assert again.columns.keys() == made.columns.keys()
    for name, column in made.columns.items():
        assert again.column(name).scope == column.scope
        assert np.array_equal(again[name], column.values)
        assert again[name].dtype == column.values.dtype
    assert np.array_equal(again.column("pixels").row_ends, [4, 7, 12])  # type: ignore[arg-type]
    assert again.per_token("of_groups").tolist() == [1] * 5 + [2] * 4


def test_a_part_has_the_columns_of_its_samples() -> None:
    part = batch().with_columns({"of_groups": Column(np.array([1.0, 2.0]), "group")}).select(np.array([1, 2]))
    assert (part.num_samples, part.num_tokens, part.num_groups) == (2, 6, 2)
    assert part["tokens"].tolist() == [0, 1, 0, 1, 2, 3]
    assert part["pixels"][:, 0].tolist() == [2] * 3 + [4] * 5
    assert part["score"].tolist() == [2, 4]
    alone = part.select(np.array([1]))
    assert (alone["of_groups"].tolist(), alone.group_of.tolist(), alone["pixels"].shape) == ([2.0], [0], (5, 3))


def test_a_column_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(DataError, match="column 'x' has 3 entries for the 9 tokens of the batch"):
        batch().with_columns({"x": np.zeros(3)})


def test_a_field_that_only_some_samples_have_is_left_out_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    one, two = sample(3, extras={"x": np.ones(3, np.float32)}), sample(3)
    with caplog.at_level(logging.WARNING, logger="trainer"):
        made = flatten([TrainingGroup("a", [one]), TrainingGroup("b", [two])])
    assert "x" not in made
    assert "field 'x' is left out of this batch: 1 of 2 samples have it" in caplog.text
    with caplog.at_level(logging.WARNING, logger="trainer"):
        assert "x" not in flatten([TrainingGroup("a", [one]), TrainingGroup("b", [replace(one, extras={"x": np.ones(3, np.int8)})])])
    assert "its entries differ: ['float32 []', 'int8 []']" in caplog.text


def test_floats_of_several_types_get_the_widest_of_them() -> None:
    given = [sample(2, extras={"x": np.ones(2, kind)}) for kind in (np.float32, np.float64, np.float16)]
    made = flatten([TrainingGroup(str(i), [one]) for i, one in enumerate(given)])
    assert (made["x"].dtype, made["x"].tolist()) == (np.float64, [1.0] * 6)


def test_a_needed_field_of_other_shapes_and_types_is_spread_over_the_tokens() -> None:
    given = [np.array([9, 0.5, -0.5], np.float32), np.array([2.0]), np.array(3, np.int32), np.array([4.0], np.float16)]
    groups = [
        TrainingGroup(str(i), [sample(n, extras={"advantages": one})]) for i, (n, one) in enumerate(zip([3, 2, 2, 1], given, strict=True))
    ]
    objective = build_objective(RunConfig())
    made = objective.advantages(objective.batch_of(groups, None))
    assert made["advantages"].values.tolist() == [0, 0.5, -0.5, 0, 2, 0, 3, 0]


@pytest.mark.parametrize(
    ("extras", "message"),
    [
        ({"teacher_logprobs": np.array(1e300)}, r"teacher_logprobs\[0\] is 1e\+300 \(1 such\); expected finite numbers"),
        ({}, r"s: no field 'teacher_logprobs', which the algorithm reads; set broker.required_fields: \[teacher_logprobs\]"),
        ({"teacher_logprobs": np.zeros(2)}, r"field 'teacher_logprobs' has shape \[2\]; expected \[3\], \[1\] or \[\]"),
        ({"teacher_logprobs": np.array([0, np.nan, -1])}, r"teacher_logprobs\[1\] is nan \(1 such\); expected finite numbers"),
    ],
)
def test_a_field_that_the_algorithm_needs_is_checked_in_every_sample(extras: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_sample(sample(3, extras=extras), "s", 99, reads_logprobs=True, fields={"teacher_logprobs"})
    first = {"teacher_logprobs": np.array([np.nan, -1, -1])}  # the first token is never trained
    check_sample(sample(3, extras=first), "s", 99, reads_logprobs=True, fields={"teacher_logprobs"})


class TurnRewards(Grpo):
    """Reads rewards of turns, one a turn, and a number."""

    row_fields = frozenset({"turn_rewards"})

    def needs(self) -> set[str]:
        return {"bonus"}


@pytest.mark.parametrize("counts", [(2, 3), (1, 1), (3, 2)], ids=["some", "one", "as-many-as-tokens"])
def test_the_scope_of_a_field_that_an_algorithm_names_does_not_follow_the_data(counts: tuple[int, int]) -> None:
    bonus = [np.array(1.0), np.array([1.0])] if counts == (1, 1) else [np.zeros(3), np.array([1.0])]
    fields = [{"turn_rewards": np.ones(count, np.float32), "bonus": one} for count, one in zip(counts, bonus, strict=True)]
    samples = [sample(length, extras=extras) for length, extras in zip((3, 2), fields, strict=True)]
    objective = Objective(RunConfig(), TurnRewards(RunConfig(), TurnRewards.Settings()), [])
    for one in samples:
        check_sample(one, "s", 99, reads_logprobs=True, fields=objective.fields, row_fields=objective.row_fields)
    made = objective.batch_of([TrainingGroup("g", samples)], None)
    assert (made.column("turn_rewards").scope, made.column("bonus").scope) == ("row", "token")
    assert made.column("turn_rewards").row_ends.tolist() == np.cumsum(counts).tolist()  # type: ignore[union-attr]
    with pytest.raises(DataError, match="s: no field 'turn_rewards', which the algorithm reads"):
        check_sample(sample(3, extras={"bonus": np.zeros(3)}), "s", 99, reads_logprobs=True, row_fields=objective.row_fields)


def test_groups_without_the_advantages_that_others_of_the_batch_bring_are_no_batch() -> None:
    own, other = sample(3, extras={"advantages": np.ones(3, np.float32)}), sample(3)
    groups = [TrainingGroup("a", [own, own]), TrainingGroup("b", [own, other]), TrainingGroup("c", [other])]
    problems = advantage_problems(groups)
    assert problems.keys() == {"b", "c"}
    assert problems["b"].startswith("group b: 1 of 2 samples bring no field 'advantages', which others of the batch bring")
    with pytest.raises(DataError, match="group b: 1 of 2 samples bring no field 'advantages'"):
        build_objective(RunConfig()).batch_of(groups, None)
    assert not advantage_problems(groups[:1])
    assert not advantage_problems(groups[2:])


def test_advantages_of_the_samples_are_used_instead_of_the_algorithms() -> None:
    given = [sample(3, extras={"advantages": np.array([9, 0.5, -0.5], np.float32)}), sample(2, extras={"advantages": np.array([9, 2.0])})]
    for one in given[1:]:
        one.extras = {"advantages": one.extras["advantages"].astype(np.float32)}
    made = build_objective(RunConfig()).advantages(flatten([TrainingGroup("g", given)]))
    assert made["advantages"].values.tolist() == [0, 0.5, -0.5, 0, 2]


def test_the_kl_in_the_reward_is_that_of_the_whole_trajectory_by_hand() -> None:
    batch = flatten(
        [TrainingGroup("g", [sample(3, trajectory=0), sample(2, trajectory=0, reward=1.0), sample(2, trajectory=1, reward=0.0)])]
    )
    batch = batch.with_columns({"reference_logprobs": np.full(7, -1.5, np.float32)})
    algorithm = AlgorithmConfig(kl_coef=0.1, kl_loss_type="k1")
    # log p - log q = 0.5 for each of 2 + 1 and of 1 trained tokens
    assert rewards_with_kl(batch, algorithm) == pytest.approx([1 - 0.15, 1 - 0.15, -0.05])
    assert build_objective(RunConfig(algorithm=algorithm)).needs == {"reference_logprobs"}


def test_a_reference_that_a_consumer_computes_is_no_pass_of_the_trainer() -> None:
    required = BrokerConfig(required_fields=["reference_logprobs"])
    objective = build_objective(RunConfig(algorithm=AlgorithmConfig(kl_loss_coef=0.1), broker=required))
    assert objective.fields == {"reference_logprobs"}
    assert not objective.needs_pass("reference_logprobs")
    assert build_objective(RunConfig(algorithm=AlgorithmConfig(kl_loss_coef=0.1))).needs_pass("reference_logprobs")


def test_no_part_of_a_batch_can_be_written() -> None:
    """A change would be seen by some ranks and not by others."""
    for values in (batch().ends, batch().group_of, batch()["tokens"], batch().select(np.array([1])).ends):
        with pytest.raises(ValueError, match="read-only"):
            values[0] = 1
