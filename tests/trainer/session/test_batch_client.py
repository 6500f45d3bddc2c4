import itertools
import re
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from made_samples import made

from slimebus.bus.errors import SlimebusError, Unreachable
from slimebus.bus.messages import NO_VERSION, Batch, BatchGroup, BatchReply, Fetch, FetchReply, Ok, Reject
from slimebus.bus.samples import Sample, encode_group
from slimebus.bus.transport.request import ReceivedReply
from slimebus.config import RunConfig
from slimebus.config.schema import AlgorithmConfig
from trainer.batches.flatten import is_failed
from trainer.objective.build_objective import build_objective
from trainer.session.batch_client import LAST_PAUSE_S, MAX_CHOICES, BatchClient, checked_lag
from trainer.session.step_batch import StepBatch


def sample(version: int) -> Sample:
    return made((NO_VERSION, 1), (version, 2), mask=[0, 1, 1])


SEVEN = BatchReply(step=7, version=7, max_staleness=2)


@pytest.mark.parametrize(("made_by", "batch", "lag"), [(5, SEVEN, 2), (0, BatchReply(step=7, version=7), 7), (NO_VERSION, SEVEN, 0)])
def test_lag_is_within_the_bound_of_the_batch_where_it_has_one_and_demonstrations_have_none(
    made_by: int, batch: BatchReply, lag: int
) -> None:
    assert checked_lag(sample(made_by), batch) == lag


@pytest.mark.parametrize("made_by", [4, 8])
def test_a_sample_beyond_the_bound_of_its_batch_or_from_the_future_is_refused(made_by: int) -> None:
    with pytest.raises(SlimebusError, match=f"a sample of version {made_by} in training of version 7; max_staleness is 2") as caught:
        checked_lag(sample(made_by), SEVEN)
    assert caught.value.code == "too_stale"


def test_a_failed_sample_is_left_out_by_the_rule_of_the_broker() -> None:
    kinds = {"completed": (1.0, False), "failed": (1.0, True), "truncated": (float("nan"), True), "aborted": (None, True)}
    for status, (reward, fails) in kinds.items():
        one = sample(5)
        one.status, one.reward = status, reward
        assert is_failed(one) == fails
    demonstration = sample(NO_VERSION)
    demonstration.reward = None
    assert not is_failed(demonstration)


ClientOf = Callable[..., BatchClient]


@pytest.fixture
def client_of(closing: Callable[..., Any]) -> ClientOf:
    """The trainer's side of a broker, closed when the test is done."""

    def make(broker: Any, config: RunConfig | None = None, **options: Any) -> BatchClient:
        client = BatchClient(broker, config or RunConfig(), 9, build_objective(config or RunConfig()), **options)
        return closing(client)  # type: ignore[no-any-return]

    return make


def taken(batch_client: BatchClient, step: int = 0) -> StepBatch:
    batch = batch_client.take_batch(step)
    assert batch is not None
    return batch


class ForgetfulBroker:
    """Chooses a batch of one group whenever it is asked, and no longer knows that group at the first `gone` fetches."""

    def __init__(self, gone: int) -> None:
        self.gone, self.num_fetches = gone, 0

    def call(self, message: Any, *, timeout_s: float) -> Any:
        if isinstance(message, Batch):
            group = BatchGroup(group="0/1", num_samples=1, num_tokens=3)
            return ReceivedReply(BatchReply(step=message.step, version=7, groups=[group]), [])
        assert isinstance(message, Fetch)
        self.num_fetches += 1
        if self.num_fetches <= self.gone:
            raise SlimebusError("fetch: group 0/1 is queued", code="not_assigned")
        frames = encode_group([sample(7)])
        return ReceivedReply(FetchReply(num_frames=[len(frames)]), frames)


def test_a_batch_that_lost_a_group_is_asked_for_again_at_a_slowing_pace(client_of: ClientOf) -> None:
    pauses: list[float] = []
    batch_client = client_of(ForgetfulBroker(gone=10), sleep=pauses.append)
    assert [group.id for group in taken(batch_client).groups] == ["0/1"]
    assert pauses == sorted(pauses)
    assert (len(pauses), pauses[0] > 0, pauses[-1]) == (10, True, LAST_PAUSE_S)


def test_a_batch_that_is_never_whole_ends_the_trainer_with_a_word(client_of: ClientOf) -> None:
    broker = ForgetfulBroker(gone=10**9)
    batch_client = client_of(broker, sleep=lambda _: None)
    with pytest.raises(SlimebusError, match=r"batch of step 0 was chosen 256 times.*0/1 is queued.*buffer verify") as caught:
        batch_client.take_batch(0)
    assert (caught.value.code, broker.num_fetches) == ("not_assigned", MAX_CHOICES)


class RefillingBroker:
    """Has one group a step for each given list of samples; gives the next one when it is handed one back."""

    def __init__(self, *groups: list[Sample] | None) -> None:
        self.groups, self.rejected = list(enumerate(groups)), dict[str, str]()
        self.away, self.asked_at = 0, list[float]()

    def call(self, message: Any, *, timeout_s: float) -> Any:
        number, samples = self.groups[0]
        if self.away:
            self.away -= 1
            raise Unreachable("no answer from the broker")
        if isinstance(message, Batch):
            if samples is None:
                self.groups.pop(0)
                return ReceivedReply(BatchReply(step=message.step, reason="waiting for a worker"), [])
            return ReceivedReply(BatchReply(step=message.step, version=7, max_staleness=2, groups=[BatchGroup(f"g{number}", 1, 3)]), [])
        if isinstance(message, Reject):
            assert list(message.groups) == [f"g{number}"]
            self.rejected |= message.groups
            self.groups.pop(0)
            return ReceivedReply(Ok(), [])
        frames = encode_group(samples)
        return ReceivedReply(FetchReply(num_frames=[len(frames)]), frames)


def changed(**changes: Any) -> Sample:
    return msgspec.structs.replace(sample(6), **changes)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (changed(rollout_logprobs=np.array([0, NAN, -1], np.float32)), r"rollout_logprobs\[1\] is nan"),
        (changed(rollout_logprobs=np.array([0, -1, -INF], np.float32)), r"rollout_logprobs\[2\] is -inf"),
        (changed(rollout_logprobs=np.array([0, -1, 0.5], np.float32)), r"rollout_logprobs\[2\] is 0.5"),
        (changed(tokens=np.array([0, 9, 1], np.int32)), "token id 9 is outside the model's vocabulary of 9"),
        (changed(tokens=np.array([0, -1, 1], np.int32)), "token id -1 is outside"),
        (changed(loss_mask=np.array([0, 1, 2], np.uint8)), "loss_mask.*2; expected 0 or 1"),
        (changed(temperature=0.0), r"temperature\[0\]`, got 0.0"),
        (changed(temperature=NAN), r"temperature\[0\]`, got nan"),
        (changed(reward=1e31), r"reward\[0\]`, got 1e[+]31"),
        (changed(reward=NAN), r"reward\[0\]`, got nan"),
        (changed(status="failed"), "all of its samples failed"),
        (changed(versions=[(NO_VERSION, 1), (4, 2)]), "a sample of version 4 in training of version 7; max_staleness is 2"),
        (changed(versions=[(NO_VERSION, 1), (8, 2)]), "a sample of version 8 in training of version 7"),
    ],
)
def test_a_group_that_cannot_be_trained_is_handed_back_with_the_reason_and_the_refilled_batch_is_taken(
    client_of: ClientOf, bad: Sample, problem: str
) -> None:
    broker = RefillingBroker([bad], [sample(6), bad], [sample(6)])
    batch_client = client_of(broker)
    batch = taken(batch_client)
    if "failed" in problem:  # beside a good one a failed sample is left out
        assert ([group.id for group in batch.groups], batch.num_rejected, list(broker.rejected)) == (["g1"], 1, ["g0"])
    else:
        assert ([group.id for group in batch.groups], batch.num_rejected, list(broker.rejected)) == (["g2"], 2, ["g0", "g1"])
    assert re.search(problem, broker.rejected["g0"])
    assert "group g0" in broker.rejected["g0"]


def test_a_group_whose_own_advantages_leave_out_the_kl_in_the_reward_is_handed_back(client_of: ClientOf) -> None:
    own, config = changed(extras={"advantages": np.ones(1, np.float32)}), RunConfig(algorithm=AlgorithmConfig(kl_coef=0.1))
    broker = RefillingBroker([own], [sample(6)])
    batch_client = client_of(broker, config)
    assert taken(batch_client).num_rejected == 1
    assert "sample 0: it brings its own field 'advantages', but algorithm.kl_coef is a part of rewards" in broker.rejected["g0"]


class PairBroker(RefillingBroker):
    """Has two groups a step; gives the next of the list for one that is handed back."""

    def call(self, message: Any, *, timeout_s: float) -> Any:
        here = dict(self.groups[:2])
        if isinstance(message, Batch):
            groups = [BatchGroup(f"g{number}", 1, 3) for number in here]
            return ReceivedReply(BatchReply(step=message.step, version=7, max_staleness=2, groups=groups), [])
        if isinstance(message, Reject):
            self.rejected |= message.groups
            self.groups = [(number, samples) for number, samples in self.groups if f"g{number}" not in self.rejected]
            return ReceivedReply(Ok(), [])
        frames = [encode_group(here[int(name[1:])] or []) for name in message.groups]
        return ReceivedReply(
            FetchReply(num_frames=[len(of_group) for of_group in frames]), [frame for of_group in frames for frame in of_group]
        )


def test_a_group_without_the_advantages_that_others_of_its_batch_bring_is_handed_back(client_of: ClientOf) -> None:
    own = changed(extras={"advantages": np.ones(1, np.float32)})
    broker = PairBroker([own], [sample(6)], [own])
    batch_client = client_of(broker)
    assert [group.id for group in taken(batch_client).groups] == ["g0", "g2"]
    assert "group g1: 1 of 1 samples bring no field 'advantages', which others of the batch bring" in broker.rejected["g1"]


def test_many_groups_that_cannot_be_trained_are_handed_back_in_requests_that_fit(
    client_of: ClientOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_client = client_of(RefillingBroker([sample(6)]))
    asked: list[Any] = []
    monkeypatch.setattr(batch_client, "_request_batch", asked.append)
    assert batch_client._reject(0, {f"group-{i}": "x" * 10_000 for i in range(2048)}) == 100
    assert len(msgspec.msgpack.encode(asked[0])) < 48 << 10


def test_logprobs_of_masked_tokens_and_of_demonstrations_may_be_anything(client_of: ClientOf) -> None:
    masked, nothing = np.array([NAN, -1, -1], np.float32), np.full(3, NAN, np.float32)
    for logprobs, algorithm in ((masked, "grpo"), (nothing, "sft")):
        config = RunConfig(algorithm=AlgorithmConfig(advantage_estimator=algorithm))
        batch_client = client_of(RefillingBroker([changed(rollout_logprobs=logprobs)]), config)
        assert taken(batch_client).num_rejected == 0


def test_a_batch_is_waited_for_as_long_as_it_takes_and_the_log_says_for_what(
    client_of: ClientOf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = itertools.count(0.0, 15.0)
    monkeypatch.setattr("trainer.session.batch_client.time.monotonic", lambda: next(clock))
    batch_client = client_of(RefillingBroker(*[None] * 4000, [sample(6)]))
    with caplog.at_level("INFO", logger="trainer"):
        assert taken(batch_client).groups
    waits = [int(re.search(r"for (\d+) s: waiting for a worker", record.message)[1]) for record in caplog.records]  # type: ignore[index]
    assert waits[:4] == [15, 30, 60, 120]
    assert max(later - earlier for earlier, later in itertools.pairwise(waits)) == 600
    assert waits[-1] > 59000


def test_a_broker_that_is_away_longer_than_any_timeout_is_waited_for(client_of: ClientOf) -> None:
    broker = RefillingBroker([sample(6)])
    broker.away = 50
    batch_client = client_of(broker)
    assert taken(batch_client).groups


def prefetching() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


class SilentBroker:
    """Never answers."""

    def call(self, message: Any, *, timeout_s: float) -> Any:
        raise Unreachable("no answer from the broker")


@pytest.mark.parametrize("broker", [SilentBroker(), ForgetfulBroker(gone=10**9)], ids=["away", "forgetful"])
def test_a_trainer_that_leaves_waits_for_no_broker(client_of: ClientOf, broker: Any) -> None:
    before = prefetching()
    batch_client = client_of(broker)
    assert batch_client.take_batch(0, 0.05) is None
    batch_client.close()
    for thread in set(prefetching()) - set(before):
        thread.join(2.0)
        assert not thread.is_alive()


def test_a_batch_that_is_not_here_yet_is_none_and_is_taken_later(client_of: ClientOf) -> None:
    class SlowBroker(RefillingBroker):
        may_answer = threading.Event()

        def call(self, message: Any, *, timeout_s: float) -> Any:
            self.may_answer.wait()
            return super().call(message, timeout_s=timeout_s)

    broker = SlowBroker([sample(6)])
    batch_client = client_of(broker)
    assert batch_client.take_batch(0, 0.01) is None
    assert batch_client.take_batch(0, 0.01) is None
    broker.may_answer.set()
    assert taken(batch_client).groups


def test_resume_and_commit_wait_for_a_broker_that_is_moved_to_another_machine(client_of: ClientOf) -> None:
    class PatientBroker:
        waits = list[float]()

        def call(self, message: Any, *, timeout_s: float) -> Any:
            self.waits.append(timeout_s)

    broker = PatientBroker()
    batch_client = client_of(broker)
    batch_client.resume(0, 0, "l", "")
    batch_client.commit(0, checkpoint=0, unused={}, metrics={})
    assert min(broker.waits) >= 600.0
