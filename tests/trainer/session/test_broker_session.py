"""What the trainer's TensorBoard and W&B are told of the others."""

from typing import Any

from trainer.session.broker_session import Tracker, scalars

STATUS: dict[str, Any] = {
    "step": 7,
    "groups": {"ready": 3},
    "waste": {"stale": {"groups": 1, "tokens": 10}, "filtered": {"groups": 2, "tokens": 5}},
    "pace": {"workers": 2},
    "clients": [
        {"role": "rollout", "metrics": {"tokens": 5.0, "sync_s": 1.0}},
        {"role": "rollout", "metrics": {"tokens": 7.0, "sync_s": 3.0}},
        {"role": "trainer", "metrics": {"loss": 9.0}},
    ],
    "evaluations": [
        {
            "key": "a",
            "dataset": "held",
            "step": 4,
            "done": True,
            "mean_reward": 0.5,
            "low": 0.4,
            "high": 0.6,
            "num_samples": 9,
            "num_failed": 0,
        },
        {"key": "b", "dataset": "held", "step": 8, "done": False},
    ],
}


class RankReport:
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, Any]]] = []

    def track(self, step: int, values: dict[str, Any]) -> None:
        self.rows.append((step, values))


def test_workers_are_summed_and_their_seconds_averaged() -> None:
    found = scalars(STATUS)
    assert found["rollout/tokens"] == 12.0
    assert found["weights/sync_s"] == 2.0
    assert (found["broker/ready"], found["broker/wasted_tokens"], found["rollout/workers"]) == (3, 15, 2)
    assert not [name for name in found if "loss" in name]


def test_an_evaluation_is_told_once_at_its_own_step() -> None:
    tracker = Tracker.__new__(Tracker)
    written: Any = RankReport()
    tracker.writer, tracker._told = written, set()
    tracker.track(STATUS)
    tracker.track(STATUS)
    evaluations = [(step, values) for step, values in written.rows if "eval/held/mean_reward" in values]
    assert [(step, values["eval/held/mean_reward"]) for step, values in evaluations] == [(4, 0.5)]
    assert [step for step, _ in written.rows] == [4, 7, 7]
