import numpy as np
import pytest

from slimebus.errors import SlimebusError
from slimebus.messages import NO_VERSION, BatchGroup, BatchReply
from slimebus.samples import Sample
from trainer.feed import is_failed, lag_of, parts


def sample(version: int) -> Sample:
    mask = np.array([0, 1, 1], np.uint8)
    versions = [(NO_VERSION, 1), (version, 2)]
    return Sample(tokens=np.zeros(3, np.int32), loss_mask=mask, rollout_logprobs=np.zeros(3, np.float32), versions=versions, reward=1.0)


SEVEN = BatchReply(step=7, version=7, max_staleness=2)


def test_a_sample_beyond_the_bound_of_its_batch_is_refused() -> None:
    assert lag_of("g", sample(5), SEVEN) == 2
    with pytest.raises(SlimebusError, match="a sample of version 4 in training of version 7; max_staleness is 2") as caught:
        lag_of("g", sample(4), SEVEN)
    assert caught.value.code == "too_stale"


def test_a_batch_chosen_without_a_bound_may_hold_samples_of_any_age() -> None:
    assert lag_of("g", sample(0), BatchReply(step=7, version=7)) == 7


def test_a_sample_from_the_future_is_refused() -> None:
    with pytest.raises(SlimebusError, match="a sample of version 8 in training of version 7"):
        lag_of("g", sample(8), SEVEN)


def test_demonstrations_have_no_lag() -> None:
    assert lag_of("g", sample(NO_VERSION), SEVEN) == 0


def test_fetches_are_cut_by_tokens_and_keep_the_order() -> None:
    groups = [BatchGroup(group=str(i), num_samples=1, num_tokens=n) for i, n in enumerate([40, 50, 30, 200, 10])]
    assert [[g.group for g in part] for part in parts(groups, 100)] == [["0", "1"], ["2"], ["3"], ["4"]]


def test_a_failed_sample_is_left_out_by_the_rule_of_the_broker() -> None:
    kinds = {"completed": (1.0, False), "failed": (1.0, True), "truncated": (float("nan"), True), "aborted": (None, True)}
    for status, (reward, fails) in kinds.items():
        one = sample(5)
        one.status, one.reward = status, reward
        assert is_failed(one) == fails
    demonstration = sample(NO_VERSION)
    demonstration.reward = None
    assert not is_failed(demonstration)
