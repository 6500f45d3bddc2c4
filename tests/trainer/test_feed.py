from typing import Any

import msgspec
import numpy as np
import pytest

from slimebus.config import RunConfig
from slimebus.errors import SlimebusError
from slimebus.messages import NO_VERSION, Batch, BatchGroup, BatchReply, Fetch, FetchReply, Put
from slimebus.samples import Sample, encode_group
from slimebus.transport.client import Reply
from trainer.feed import LAST_PAUSE_S, MAX_CHOICES, Feed, is_failed, lag_of, parts


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


class ForgetfulBroker:
    """Chooses a batch of one group whenever it is asked, and no longer knows that group at the first `gone` fetches."""

    def __init__(self, gone: int) -> None:
        self.gone, self.num_fetches = gone, 0

    def call(self, message: Any, *, timeout_s: float) -> Any:
        if isinstance(message, Batch):
            group = BatchGroup(group="0/1", num_samples=1, num_tokens=3)
            return Reply(BatchReply(step=message.step, version=7, groups=[group]), [])
        assert isinstance(message, Fetch)
        self.num_fetches += 1
        if self.num_fetches <= self.gone:
            raise SlimebusError("fetch: group 0/1 is queued", code="not_assigned")
        headers, fields, frames = encode_group([sample(7)])
        record = msgspec.msgpack.encode(Put(group="0/1", lease=0, attempt=0, lineage="", samples=headers, fields=fields))
        return Reply(FetchReply(num_frames=[1 + len(frames)]), [record, *frames])


def test_a_batch_that_lost_a_group_is_asked_for_again_at_a_slowing_pace() -> None:
    pauses: list[float] = []
    feed = Feed(ForgetfulBroker(gone=10), RunConfig(), sleep=pauses.append)  # type: ignore[arg-type]
    assert [group.id for group in feed.take(0).groups] == ["0/1"]
    assert pauses == sorted(pauses)
    assert (len(pauses), pauses[0] > 0, pauses[-1]) == (10, True, LAST_PAUSE_S)
    feed.close()


def test_a_batch_that_is_never_whole_ends_the_trainer_with_a_word() -> None:
    broker = ForgetfulBroker(gone=10**9)
    feed = Feed(broker, RunConfig(), sleep=lambda _: None)  # type: ignore[arg-type]
    with pytest.raises(SlimebusError, match=r"batch of step 0 was chosen 256 times.*0/1 is queued.*buffer verify") as caught:
        feed.take(0)
    assert (caught.value.code, broker.num_fetches) == ("not_assigned", MAX_CHOICES)
    feed.close()
