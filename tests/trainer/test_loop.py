"""How the loop waits for a batch: not longer than a broadcast may take, and not at all once it is asked to stop."""

from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest

from slimebus.bus.errors import Fenced
from trainer import loop
from trainer.checkpoint.folder import Progress
from trainer.loop import next_batch, train
from trainer.session.broker_session import BrokerSession
from trainer.session.step_batch import NOT_YET, StepPlan


class Session:
    """Has the batch at the given look."""

    def __init__(self, ready_at: int) -> None:
        self.ready_at, self.looks = ready_at, 0

    def take_batch(self, step: int, wait_s: float) -> Any:
        self.looks += 1
        return self if self.looks >= self.ready_at else None

    def plan(self, schedule: list[float], num_passes: int) -> StepPlan:
        return StepPlan(len(schedule), tuple(schedule), publishes=True)

    def record(self, batch: Any) -> None:
        self.recorded = batch


class Stop:
    is_made = False
    deferred = staticmethod(nullcontext)
    keep_deadline = staticmethod(lambda: None)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """The plans that the other ranks hear of; a turn is 60 looks long."""
    plans: list[StepPlan] = []
    monkeypatch.setattr(loop.parallel, "broadcast_value", lambda plan, form: plans.append(plan) or plan)
    clock = iter(range(10**6))
    monkeypatch.setattr("trainer.loop.time.monotonic", lambda: float(next(clock)))
    return plans


def test_other_ranks_hear_every_turn_that_the_batch_is_still_waited_for(shared: list[StepPlan]) -> None:
    session = Session(ready_at=200)
    batch, plan = next_batch(session, 3, [0.2, 0.1], Stop())  # type: ignore[arg-type]
    assert (batch, plan) == (session, StepPlan(2, (0.2, 0.1), publishes=True))
    assert session.recorded is session
    assert shared == [NOT_YET] * 3 + [plan]


def test_a_stop_ends_the_wait_on_every_rank(shared: list[StepPlan]) -> None:
    stop = Stop()
    stop.is_made = True
    assert next_batch(Session(ready_at=10**9), 3, [0.2, 0.1], stop) == (None, StepPlan(stops=True))  # type: ignore[arg-type]
    assert shared == [StepPlan(stops=True)]


def test_a_trainer_tells_the_broker_whose_checkpoint_it_goes_on_from_and_saves_under_its_own_lineage() -> None:
    start, checkpoints, session, config = Progress(step=3, version=3, num_updates=6, lineage="L"), Mock(lineage=""), Mock(), Mock()
    checkpoints.resume.return_value, config.rollout.num_rollout = start, 3
    publication = Mock(lineage="M")
    train(Mock(), session, publication, checkpoints, Mock(), config, Mock(), Stop())  # type: ignore[arg-type]
    assert session.begin.call_args.args[:2] == (start, publication)
    assert checkpoints.check_newest.call_count == 2, "before and after the broker was told"
    assert checkpoints.lineage == "M"


def test_a_trainer_whose_place_was_taken_while_its_model_loaded_says_so_and_begins_nothing() -> None:
    session = BrokerSession.__new__(BrokerSession)
    session.client = Mock()
    session.lost = Fenced("a newer trainer has taken the place of 'trainer'")
    with pytest.raises(Fenced, match="a newer trainer"):
        session.begin(Progress(step=0, version=0, num_updates=0), Mock(), 100)
    session.client.call.assert_not_called()
