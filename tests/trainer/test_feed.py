import numpy as np
import pytest

from slimebus.config import resolve
from slimebus.errors import SlimebusError
from slimebus.messages import NO_VERSION, BatchGroup
from slimebus.samples import Sample
from trainer.feed import Feed, parts


def sample(version: int) -> Sample:
    mask = np.array([0, 1, 1], np.uint8)
    versions = [(NO_VERSION, 1), (version, 2)]
    return Sample(tokens=np.zeros(3, np.int32), loss_mask=mask, rollout_logprobs=np.zeros(3, np.float32), versions=versions, reward=1.0)


@pytest.fixture
def feed() -> Feed:
    config = resolve(None, {"broker.max_staleness": "2"}, {}).config
    return Feed(None, config)  # type: ignore[arg-type]


def test_a_sample_beyond_the_bound_is_refused_whatever_the_broker_said(feed: Feed) -> None:
    assert feed._lag("g", sample(5), version=7) == 2
    with pytest.raises(SlimebusError, match="a sample of version 4 in training of version 7; max_staleness is 2") as caught:
        feed._lag("g", sample(4), version=7)
    assert caught.value.code == "too_stale"


def test_a_sample_from_the_future_is_refused(feed: Feed) -> None:
    with pytest.raises(SlimebusError, match="a sample of version 8 in training of version 7"):
        feed._lag("g", sample(8), version=7)


def test_demonstrations_have_no_lag(feed: Feed) -> None:
    assert feed._lag("g", sample(NO_VERSION), version=7) == 0


def test_fetches_are_cut_by_tokens_and_keep_the_order() -> None:
    groups = [BatchGroup(group=str(i), num_samples=1, num_tokens=n) for i, n in enumerate([40, 50, 30, 200, 10])]
    assert [[g.group for g in part] for part in parts(groups, 100)] == [["0", "1"], ["2"], ["3"], ["4"]]
